"""Greedy answers of two engines to the same prompts, and why they differ where they do.

    python benchmarks/beside_vllm.py FOLDER vllm.json                  the other engine; only its answers are needed
    python benchmarks/compare_answers.py FOLDER vllm.json --json FILE [OPTION=JSON ...]
    python benchmarks/compare_answers.py FOLDER --prompts 4 --tokens 8         without another engine: both are this one

Options are EngineConfig's. Answers agree up to a first token in which they differ. There, after the tokens in which
they agree, the margin of a model is its logit of our token minus that of theirs: by our kernels in the model's dtype,
and by the references of all ops on the same weights, dequantised, with activations in bf16 and in fp32. A margin in
fp32 that is not twice the noise (how far the other two margins are from it) is a tie within what bf16 rounds by; one
that fp32 decides clearly for theirs is an error of ours.

FILE is written when the answers have been compared, and again with the margins of each form of the model: a run that is
cut leaves what it had.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from anabranch import kernels, ops, platforms
from anabranch.bench.records import commit
from anabranch.engine import kv_tensors
from anabranch.engine.batch import StepMaker
from anabranch.engine.scheduler import Sequence, Share
from anabranch.llm import LLM, SamplingParams
from anabranch.loader.load import load_model
from anabranch.models.config import read_config
from anabranch.models.decoder import Decoder
from anabranch.ops.op import Kernel
from anabranch.request import Request

PROMPT = 100
"""Tokens of a prompt, as in beside_vllm."""
BATCH = 4096
"""The most tokens in a step that explains."""
PAGE_SIZE = 16


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


def batches(contexts: list[list[int]]) -> list[list[list[int]]]:
    """In order, as many together as fit into a step; a longer one is alone."""
    found: list[list[list[int]]] = []
    for context in contexts:
        if not found or sum(map(len, found[-1])) + len(context) > BATCH:
            found.append([])
        found[-1].append(context)
    return found


@torch.inference_mode()
def last_logits(decoder: Decoder, contexts: list[list[int]]) -> torch.Tensor:
    """logits_RV after each context, of two tokens or more; all in one step."""
    weight, groups = decoder.embed_tokens.weight, decoder.config.cache_groups
    states = [index for index, group in enumerate(groups) if not group.policy.per_token]
    starts = [0, *accumulate(-(-len(context) // PAGE_SIZE) for context in contexts)]
    shares, pages = [], {}
    for slot, context in enumerate(contexts):
        sequence = Sequence(Request(id=str(slot), prompt_ids=tuple(context), params=SamplingParams()), slot)
        sequence.slot = slot
        shares.append(Share(sequence, 0, len(context), 1))
        own = list(range(starts[slot], starts[slot + 1]))
        # A state is one page. The tables of all groups have the same length.
        pages[sequence.id] = [[slot] * len(own) if index in states else own for index in range(len(groups))]
    num_pages = [len(contexts) if index in states else starts[-1] for index in range(len(groups))]
    kv = kv_tensors.allocate(decoder.config, num_pages, PAGE_SIZE, weight.dtype, weight.device)
    longest = max(map(len, contexts))
    steps = StepMaker(len(groups), len(contexts), longest, PAGE_SIZE, weight.device, states=states)
    step = steps.make(shares, pages.__getitem__)
    return decoder.logits(decoder(step, kv)[step.query_start_R[1:] - 1])


def by_expert(call: ops.ExpertsCall) -> torch.Tensor:
    """The reference of ops.experts, which goes through pairs of tokens and experts, with all tokens of an expert at a
    time: the same products in fp32, in minutes less."""
    x_TD = call.x_TD
    gate_up_EFD, down_EDI = call.gate_up_EFD.dense(x_TD.dtype), call.down_EDI.dense(x_TD.dtype)
    y_TKD = torch.zeros(*call.expert_TK.shape, x_TD.shape[1], device=x_TD.device)
    for e in range(gate_up_EFD.shape[0]):
        token_N, k_N = (call.expert_TK == e).nonzero(as_tuple=True)
        h_NF = x_TD[token_N].float() @ gate_up_EFD[e].float().T
        if call.gate_up_bias_EF is not None:
            h_NF = h_NF + call.gate_up_bias_EF[e].float()
        y_ND = ops.gated_activation.reference(h_NF, call.activation) @ down_EDI[e].float().T
        if call.down_bias_ED is not None:
            y_ND = y_ND + call.down_bias_ED[e].float()
        y_TKD[token_N, k_N] = y_ND * call.weight_TK[token_N, k_N, None] * call.scaling
    return (y_TKD.sum(1) if call.combined else y_TKD).to(x_TD.dtype)


def margins(
    model: str, dtype: str, provider: str, contexts: list[list[int]], pairs: list[tuple[int, int]]
) -> list[tuple[float, int]]:
    """After each context: the margin between two tokens, and the token with the highest logit. Contexts share steps:
    references dequantise the weights of a layer in each."""
    platform = platforms.current()
    decoder = load_model(model, dtype=dtype, platform=platform)
    if provider:
        ops.bind(platform, provider)
        ops.experts.bound = (Kernel("by_expert", by_expert, None, None, None),)
    logits_RV = torch.cat([last_logits(decoder, some).double().cpu() for some in batches(contexts)])
    found = [(float(row_V[a] - row_V[b]), int(row_V.argmax())) for row_V, (a, b) in zip(logits_RV, pairs, strict=True)]
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
    rows: list[dict[str, Any]] = [one | {"margins": {}} for one in explained]
    about = {"model": options.model, "commit": commit(), "against": where, "dtype": options.dtype}
    counts = {"prompts": count, "tokens": num_tokens, "same_first_tokens": num_first, "same_tokens": num_same}

    def save() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(about | counts | {"differences": rows, "ours": ours}, indent=1) + "\n")

    save()
    if not rows:
        return
    prompts = make_prompts(count, read_config(options.model).vocab_size)
    contexts = [prompts[row["prompt"]] + ours[row["prompt"]][: row["place"]] for row in rows]
    pairs = [(row["ours"], row["theirs"]) for row in rows]
    forms = {
        "kernels": (options.dtype, ""),
        "reference bf16": ("bfloat16", "reference"),
        "reference fp32": ("float32", "reference"),
    }
    for name, (dtype, provider) in forms.items():
        print(f"{name}: margins of {len(rows)} differences ...", flush=True)
        start = time.perf_counter()
        found = margins(options.model, dtype, provider, contexts, pairs)
        print(f"{name}: {time.perf_counter() - start:.1f} s, with loading", flush=True)
        for row, (margin, _) in zip(rows, found, strict=True):
            row["margins"][name] = margin
        save()

    print(
        f"{'prompt':>6} {'place':>5} {'ours':>7} {'theirs':>7}" + "".join(f"{name:>16}" for name in forms) + "  verdict"
    )
    for row, pair, (exact, best) in zip(rows, pairs, found, strict=True):  # of the last form, fp32
        values = row["margins"]
        noise = max(abs(values[name] - exact) for name in ("kernels", "reference bf16"))
        verdict = "neither" if best not in pair else "ours" if exact > 0 else "theirs"
        if abs(exact) <= 2 * noise:
            verdict = f"tie within rounding ({verdict} in fp32)"
        row |= {"noise": noise, "verdict": verdict}
        cells = "".join(f"{value:16.4f}" for value in values.values())
        print(f"{row['prompt']:6} {row['place']:5} {row['ours']:7} {row['theirs']:7}{cells}  {verdict}")
    save()


if __name__ == "__main__":
    main()
