"""Step 4: look at a trained folder through Anabranch, and write its model card. Needs no GPU.

    python -m tools.train_demo.card FOLDER --text text.json --dense DENSE/training.json --pin tests/bundled/pinned.json

FOLDER is what train left. README.md is written into it from training.json, data.json and what is measured here: ten
samples from fixed seeds, single-stream speed. `--pin` also writes the greedy continuations that a test then holds the
engine to.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

from anabranch.llm import LLM, SamplingParams

SAMPLES = (
    "Tell me a story about a little fox who finds a red ball.",
    "Write a short story about a girl who is afraid of the dark.",
    "Tell me a story about a bear who makes a cake.",
    "Can you tell me a story about a boy who makes a new friend?",
    "What is the moon?",
    "Why do we sleep?",
    "I am sad.",
)
CONTINUED = ("Once upon a time, there was a small", "One day, Lily and Ben", "It was winter, and the little bird")
PINNED = ("Once upon a time", "One sunny day, Tom and his dog", "The little fox")
NUM_PINNED = 32
CARD = Path(__file__).with_name("card.md").read_text()


def sample(llm: LLM) -> list[tuple[str, str]]:
    prompts = [llm.render([{"role": "user", "content": text}]) for text in SAMPLES]
    prompts += [llm.tokenizer.encode(text) for text in CONTINUED]
    params = [SamplingParams(temperature=0.7, top_p=0.95, seed=seed, max_tokens=220) for seed in range(len(prompts))]
    outputs = llm.generate(prompts, params)
    return list(zip((*SAMPLES, *CONTINUED), (output.completions[0].text for output in outputs), strict=True))


def quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())


def greedy(llm: LLM) -> list[dict[str, Any]]:
    """Continuations, each with the least lead of the best token over the second: a pin must not hang on rounding."""
    params = SamplingParams(temperature=0, max_tokens=NUM_PINNED, ignore_eos=True, logprobs=2)
    found = []
    for prompt, output in zip(PINNED, llm.generate(list(PINNED), params), strict=True):
        answer = output.completions[0]
        lead = min(place.top[0][1] - place.top[1][1] for place in answer.logprobs or [])
        row = {"prompt": prompt, "text": answer.text, "token_ids": answer.token_ids, "lead": round(lead, 4)}
        found.append(row)
    return found


def speed(llm: LLM) -> float:
    """Tokens a second of one greedy stream, the best of five: other work on the machine only ever slows it."""
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        llm.generate("Once upon a time", params)
        best = min(best, time.perf_counter() - started)
    return params.max_tokens / best


def fill(training: dict[str, Any], data: dict[str, Any], text: dict, dense: dict, llm: LLM) -> str:
    shape, counts = training["shape"], training["parameters"]
    losses = {"this model": training["heldout_loss"]}
    losses["this model, every token at the wrong experts"] = training["heldout_loss_wrong_experts"]
    if dense:
        size = dense["parameters"]["total"] / 1e6
        losses[f"dense, as wide as a token's experts ({size:.1f}M), same steps"] = dense["heldout_loss"]
    losses["bigram"] = training["bigram_loss"]
    load = [
        f"| layer | {' | '.join(map(str, range(shape['num_experts'])))} |",
        "|---" * (shape["num_experts"] + 1) + "|",
    ]
    for layer_id, shares in enumerate(training["expert_load"]):
        load.append(f"| {layer_id} | {' | '.join(f'{100 * share:.1f}' for share in shares)} |")
    return CARD.format(
        millions=counts["total"] / 1e6,
        active=counts["active"] / 1e6,
        layers=shape["num_layers"],
        experts=shape["num_experts"],
        top_k=shape["top_k"],
        vocab_size=shape["vocab_size"],
        megabytes=2 * counts["total"] / 1e6,
        answers=sum(data["answers_by_kind"].values()),
        unique_tokens=data["train"]["tokens"],
        teacher_speed=f"{text['output_tokens_per_second']:,.0f}" if text else "?",
        teacher_machine=text.get("machine", "?"),
        tokens_per_step=training["batch"] * training["length"],
        losses="\n".join(f"| {name} | {loss:.3f} | {math.exp(loss):.2f} |" for name, loss in losses.items()),
        threads=os.environ.get("OMP_NUM_THREADS", os.cpu_count()),
        speed=speed(llm),
        even=100 / shape["num_experts"],
        load="\n".join(load),
        samples="\n\n".join(f"**{asked}**\n\n{quote(answer)}" for asked, answer in sample(llm)),
        **{name: training[name] for name in ("steps", "epochs", "seconds", "machine")},
    )


def read(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text()) if path else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, metavar="FILE", help="text.json of write_text")
    parser.add_argument("--dense", type=Path, metavar="FILE", help="training.json of the dense model")
    parser.add_argument("--pin", type=Path, metavar="FILE", help="write greedy continuations there")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="copy what a user needs of the folder there")
    options = parser.parse_args()
    training, data = read(options.folder / "training.json"), read(options.folder / "data.json")
    with LLM(str(options.folder), max_num_seqs=16, max_num_batched_tokens=2048) as llm:
        card = fill(training, data, read(options.text), read(options.dense), llm)
        pinned = greedy(llm)
    (options.folder / "README.md").write_text(card)
    print(card)
    if options.pin:
        options.pin.write_text(json.dumps(pinned, indent=1) + "\n")
    for row in pinned:
        print(f"pinned, least lead {row['lead']}: {row['prompt']}{row['text']}")
    if options.copy:
        options.copy.mkdir(parents=True, exist_ok=True)
        for path in options.folder.iterdir():
            if path.name != "data.json":
                shutil.copyfile(path, options.copy / path.name)  # not its mode: safetensors writes for the owner alone


if __name__ == "__main__":
    main()
