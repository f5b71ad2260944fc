"""Step 3: look at a trained folder through Anabranch, and write its model card. Needs no GPU.

    python -m tools.train_demo.card FOLDER --dense DENSE/training.json --before src/anabranch/bundled/demo \
        --pin tests/bundled/pinned.json --copy src/anabranch/bundled/demo

FOLDER is what train left. README.md is written into it from training.json, data.json and what is measured here: ten
samples from fixed seeds, the loss beside the model before, single-stream speed. `--pin` also writes the greedy
continuations that a test then holds the engine to.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from anabranch.engine.single import SingleSequence
from anabranch.llm import LLM, SamplingParams
from anabranch.loader.load import load_model
from anabranch.text.tokenizer import Tokenizer
from tools.train_demo import behave, conversations, sentences, write_conversations

SAMPLES = (
    ("Tell me a story about a little fox who finds a red ball.", "And then?"),
    ("Name three animals that can fly.", "Another one."),
    ("Is the sun hot? Yes or no.", "Why?"),
    ("My name is Anna.", "What is my name?"),
    ("Write a short story about a girl who is afraid of the dark.", "Call the girl Rosa."),
    ("Tell me a story about a bear who makes a cake.", "Make it shorter."),
    ("What are you?", "Can you browse the web?", "Which program runs you?"),
    ("Why do we sleep?", "Can a fish walk?", "And what does it eat?"),
    ("What is the capital of France?", "Tell me a joke, then."),
)
CONTINUED = "Once upon a time, there was a small"
PINNED = (
    "Once upon a time", "One sunny day", "The little fox", "There was once", "Once there was a brave", "Far away,",
    "Long ago, a", "Once upon a time, there was a", "Mia was a",
)  # fmt: skip
NUM_PINNED, MIN_LEAD = 32, 0.01
CARD = Path(__file__).with_name("card.md").read_text()
SEEDS = range(10)


def sample(llm: LLM, max_tokens: int = 300) -> list[list[tuple[str, str]]]:
    """Turns of ten samples: (what was said, the answer)."""
    found: list[list[tuple[str, str]]] = []
    for seed, asked in zip(SEEDS, SAMPLES, strict=False):
        messages: list[dict[str, str]] = []
        params = SamplingParams(temperature=0.3, seed=seed, max_tokens=max_tokens)
        for text in asked:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": llm.chat(messages, params)[0].completions[0].text})
        said = [message["content"] for message in messages]
        found.append(list(zip(said[::2], said[1::2], strict=True)))
    params = SamplingParams(temperature=0.3, seed=SEEDS[-1], max_tokens=max_tokens)
    found.append([(CONTINUED, llm.generate(CONTINUED, params)[0].completions[0].text)])
    return found


def faults(samples: list[list[tuple[str, str]]]) -> Counter[str]:
    """How many answers have each fault: loops, no end, nothing said."""
    answers = [answer.strip() for turns in samples for _, answer in turns]
    return Counter(sentences.fault(answer) or "none" if answer else "empty" for answer in answers)


def quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())


def greedy(llm: LLM) -> list[dict[str, Any]]:
    """Three continuations, each with the least lead of the best token over the second: a pin must not hang on
    rounding, so beginnings after which two tokens are as good as each other are left out."""
    params = SamplingParams(temperature=0, max_tokens=NUM_PINNED, ignore_eos=True, logprobs=2)
    found = []
    for prompt, output in zip(PINNED, llm.generate(list(PINNED), params), strict=True):
        answer = output.completions[0]
        lead = min(place.top[0][1] - place.top[1][1] for place in answer.logprobs or [])
        row = {"prompt": prompt, "text": answer.text, "token_ids": answer.token_ids, "lead": round(lead, 4)}
        found.append(row)
    best = sorted(found, key=lambda row: -row["lead"])[:3]
    return [row for row in found if row["lead"] > MIN_LEAD][:3] if best[-1]["lead"] > MIN_LEAD else best


def speed(llm: LLM) -> float:
    """Tokens a second of one greedy stream, the best of five: other work on the machine only ever slows it."""
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        llm.generate("Once upon a time", params)
        best = min(best, time.perf_counter() - started)
    return params.max_tokens / best


def heldout(num_documents: int) -> dict[str, list[list[int]]]:
    """Token ids of documents that neither model was trained on, by what wrote them."""
    tokenizer = write_conversations.TOKENIZER / "tokenizer.json"
    first = write_conversations.HELDOUT_FIRST
    split = {"this recipe": write_conversations.write(first, num_documents, tokenizer, 1)[0]}
    split["the recipe before, with a teacher"] = write_conversations.earlier(tokenizer)
    documents = {}
    for name, tokens in split.items():
        text = Tokenizer(write_conversations.TOKENIZER).backend.decode(tokens.tolist(), skip_special_tokens=False)
        encode = Tokenizer(write_conversations.TOKENIZER).backend.encode
        pieces = [conversations.END + piece for piece in text.split(conversations.END) if piece]
        documents[name] = [encode(piece, add_special_tokens=False).ids[:1024] for piece in pieces]
    return documents


def perplexity(folder: Path, documents: list[list[int]]) -> float:
    """Of each document alone, as a user's conversation is read."""
    model = load_model(str(folder), dtype="float32")
    total, count = 0.0, 0
    for ids in documents:
        with torch.inference_mode():
            logits = SingleSequence(model, len(ids)).forward(ids)
        total += torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum").item()
        count += len(ids) - 1
    return math.exp(total / count)


def table(columns: list[dict[str, float]], form: str) -> str:
    """Rows of a table of figures by name, one column a model; without a model before, a dash."""
    rows = [(name, [form.format(column[name]) for column in columns]) for name in columns[0]]
    return "\n".join(f"| {name} | {' | '.join((*values, '-')[:2])} |" for name, values in rows)


def fill(
    training: dict[str, Any], data: dict[str, Any], dense: dict, before: Path | None, llm: LLM, folder: Path
) -> str:
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
    samples = sample(llm)
    print(f"faults of the samples: {dict(faults(samples))}")
    turns = [f"**{asked}**\n\n{quote(answer)}" for sample_turns in samples for asked, answer in sample_turns]
    folders = [folder, *([before] if before else [])]
    documents = heldout(60)
    perplexities = [{name: perplexity(one, found) for name, found in documents.items()} for one in folders]
    return CARD.format(
        millions=counts["total"] / 1e6,
        active=counts["active"] / 1e6,
        layers=shape["num_layers"],
        experts=shape["num_experts"],
        top_k=shape["top_k"],
        vocab_size=shape["vocab_size"],
        context=shape["max_position"],
        megabytes=2 * counts["total"] / 1e6,
        documents=data["documents"],
        unique_tokens=data["train"]["tokens"],
        most_turns=conversations.MOST_TURNS,
        repeats=data["repetition"]["share of words"],
        tokens_per_step=training["batch"] * training["length"],
        length=training["length"],
        losses="\n".join(f"| {name} | {loss:.3f} | {math.exp(loss):.2f} |" for name, loss in losses.items()),
        beside=table(perplexities, "{:.2f}"),
        num_talks=behave.NUM,
        behaviour=table([behave.behaviour(one) for one in folders], "{:.0%}"),
        num_recall=behave.NUM_RECALL,
        recall="\n".join(f"| {tokens:,} | {share:.0%} |" for tokens, share in behave.recall(folder).items()),
        threads=os.environ.get("OMP_NUM_THREADS", os.cpu_count()),
        speed=speed(llm),
        even=100 / shape["num_experts"],
        load="\n".join(load),
        samples="\n\n".join(turns),
        **{name: training[name] for name in ("steps", "epochs", "seconds", "machine")},
    )


def read(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text()) if path and path.is_file() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dense", type=Path, metavar="FILE", help="training.json of the dense model")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="the model to put beside it")
    parser.add_argument("--pin", type=Path, metavar="FILE", help="write greedy continuations there")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="copy what a user needs of the folder there")
    options = parser.parse_args()
    training, data = read(options.folder / "training.json"), read(options.folder / "data.json")
    if not training:
        raise SystemExit(f"error: {options.folder} has no training.json; was its training cut short?")
    with LLM(str(options.folder), max_num_seqs=16, max_num_batched_tokens=2048) as llm:
        card = fill(training, data, read(options.dense), options.before, llm, options.folder)
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
            if path.name not in ("data.json", "dense.json"):
                shutil.copyfile(path, options.copy / path.name)  # not its mode: safetensors writes for the owner alone


if __name__ == "__main__":
    main()
