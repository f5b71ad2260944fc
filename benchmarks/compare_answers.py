"""Greedy answers of two engines to the same prompts, and why they differ where they do.

    python benchmarks/beside_vllm.py FOLDER vllm.json                  the other engine; only its answers are needed
    python benchmarks/compare_answers.py FOLDER vllm.json --json FILE [OPTION=JSON ...]
    python benchmarks/compare_answers.py FOLDER --prompts 4 --tokens 8         without another engine: both are this one

Options are EngineConfig's. Answers agree up to a first token in which they differ. There, after the tokens in which
they agree, the margin of a model is its logit of our token minus that of theirs: by our kernels in the model's dtype,
and by the references of all ops on the same weights, dequantised, with activations in bf16 and in fp32. A margin in
fp32 that is not twice the noise (how far the other two margins are from it) is a tie within what bf16 rounds by; one
that fp32 decides clearly for theirs is an error of ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from pathlib import Path
from typing import Any

import torch

from anabranch import kernels, ops, platforms
from anabranch.bench.records import commit
from anabranch.engine.single import SingleSequence
from anabranch.llm import LLM, SamplingParams
from anabranch.loader.load import load_model
from anabranch.models.config import read_config

PROMPT = 100
"""Tokens of a prompt, as in beside_vllm."""


def make_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Those of beside_vllm, where the vocabulary has so many tokens."""
    rng, range_of = random.Random(7), (1000, 100_000) if vocabulary >= 100_000 else (0, vocabulary)
    return [[rng.randrange(*range_of) for _ in range(PROMPT)] for _ in range(count)]


def our_answers(model: str, count: int, num_tokens: int, given: dict[str, Any]) -> list[list[int]]:
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    with LLM(model, show_progress=False, prefix_cache=False, **given) as llm:
        prompts = make_prompts(count, llm.engine.model.vocab_size)
        return [list(output.token_ids) for output in llm.generate(prompts, params)]  # type: ignore[arg-type]


def first_differences(ours: list[list[int]], theirs: list[list[int]]) -> list[dict[str, int]]:
    found = []
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for place, (a, b) in enumerate(zip(mine, other)):
            if a != b:
                found.append({"prompt": number, "place": place, "ours": a, "theirs": b})
                break
    return found


def margins(
    model: str, dtype: str, provider: str, contexts: list[list[int]], pairs: list[tuple[int, int]]
) -> list[Any]:
    """After each context: the margin between two tokens, and the token with the highest logit."""
    platform = platforms.current()
    decoder = load_model(model, dtype=dtype, platform=platform)
    if provider:
        ops.bind(platform, provider)
    found = []
    for context, (ours, theirs) in zip(contexts, pairs, strict=True):
        logits_V = SingleSequence(decoder, len(context)).forward(context, all_logits=False)[-1].double().cpu()
        found.append((float(logits_V[ours] - logits_V[theirs]), int(logits_V.argmax())))
    kernels.bind(platform)
    del decoder
    gc.collect()
    if platform.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("answers", nargs="?", type=Path, metavar="ANSWERS", help="JSON with a list `answers`")
    parser.add_argument("options", nargs="*", metavar="OPTION=JSON")
    parser.add_argument("--prompts", type=int, default=64, metavar="N", help="without ANSWERS")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="without ANSWERS")
    parser.add_argument("--dtype", default="bfloat16", help="of our kernels and of the first reference")
    parser.add_argument("--explain", type=int, default=16, metavar="N", help="disagreements, first tokens first")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    given = {name: json.loads(value) for name, value in (option.split("=", 1) for option in options.options)}
    if options.answers is None:
        # Another order of sums: each request alone, on references.
        theirs, where = None, "ourselves in fp32"
    else:
        theirs, where = json.loads(options.answers.read_text())["answers"], str(options.answers)
    count, num_tokens = (options.prompts, options.tokens) if theirs is None else (len(theirs), len(theirs[0]))
    ours = our_answers(options.model, count, num_tokens, {"dtype": options.dtype} | given)
    if theirs is None:
        theirs = our_answers(options.model, count, num_tokens, {"dtype": "float32"} | given)

    differences = first_differences(ours, theirs)
    num_first = sum(mine[0] == other[0] for mine, other in zip(ours, theirs, strict=True))
    num_same = sum(a == b for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other))
    print(f"first tokens: {num_first} of {count} are those of {where}")
    num_equal, num_all = count - len(differences), count * num_tokens
    print(f"answers: {num_equal} of {count} are the same to the end; {num_same} of {num_all} tokens")
    explained = sorted(differences, key=lambda one: (one["place"], one["prompt"]))[: options.explain]
    rows: list[dict[str, Any]] = []
    if explained:
        prompts = make_prompts(count, read_config(options.model).vocab_size)
        contexts = [prompts[one["prompt"]] + ours[one["prompt"]][: one["place"]] for one in explained]
        pairs = [(one["ours"], one["theirs"]) for one in explained]
        by = {
            "kernels": margins(options.model, options.dtype, "", contexts, pairs),
            "reference bf16": margins(options.model, "bfloat16", "reference", contexts, pairs),
            "reference fp32": margins(options.model, "float32", "reference", contexts, pairs),
        }
        print(
            f"{'prompt':>6} {'place':>5} {'ours':>7} {'theirs':>7}"
            + "".join(f"{name:>16}" for name in by)
            + "  verdict"
        )
        for number, one in enumerate(explained):
            values = {name: found[number][0] for name, found in by.items()}
            noise = max(abs(values[name] - values["reference fp32"]) for name in ("kernels", "reference bf16"))
            exact, best = by["reference fp32"][number]
            verdict = "neither" if best not in pairs[number] else "ours" if exact > 0 else "theirs"
            if abs(exact) <= 2 * noise:
                verdict = f"tie within rounding ({verdict} in fp32)"
            rows.append(one | {"margins": values, "noise": noise, "verdict": verdict})
            cells = "".join(f"{value:16.4f}" for value in values.values())
            print(f"{one['prompt']:6} {one['place']:5} {one['ours']:7} {one['theirs']:7}{cells}  {verdict}")
    if options.json is not None:
        about = {"model": options.model, "commit": commit(), "against": where, "dtype": options.dtype}
        counts = {"prompts": count, "tokens": num_tokens, "same_first_tokens": num_first, "same_tokens": num_same}
        options.json.write_text(json.dumps(about | counts | {"differences": rows, "ours": ours}, indent=1) + "\n")


if __name__ == "__main__":
    main()
