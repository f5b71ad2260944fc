"""Step 1: write the text, and its token ids. All of it follows from the tables; no model takes part. Needs no GPU.

    python -m tools.train_demo.write_conversations DATA --documents 640000

DATA then holds train.npz, heldout.npz (documents of other numbers) and earlier.npz (what a teacher model wrote for the
recipe of the first demo model, which neither model was trained on), the tokenizer's files, and data.json (sizes,
repetition). The tokenizer is the first demo model's: losses of both models are then in the same tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import re
import shutil
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tools.train_demo import conversations, sentences

TOKENIZER = Path(__file__).parents[2] / "src/anabranch/bundled/demo"
EARLIER = Path(__file__).with_name("earlier.jsonl.gz")
EARLIER_SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a kind storyteller.", "Answer in simple words.")
HELDOUT_FIRST = 10**9
"""The numbers of held-out documents begin here."""
ROUND = 2000
"""Documents that a process writes at a time."""
MAX_POSITION = 2048
ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", re.DOTALL)


def encode(first: int, count: int, tokenizer: str) -> tuple[np.ndarray, int]:
    """(token ids of documents, characters)"""
    texts = [conversations.document(number) for number in range(first, first + count)]
    return tokens_of(texts, tokenizer), sum(map(len, texts))


def tokens_of(texts: list[str], tokenizer: str) -> np.ndarray:
    encodings = Tokenizer.from_file(tokenizer).encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings])


def write(first: int, count: int, tokenizer: Path, processes: int) -> tuple[np.ndarray, int]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are enough
    firsts = range(first, first + count, ROUND)
    counts = [min(ROUND, first + count - start) for start in firsts]
    work = partial(encode, tokenizer=str(tokenizer))
    if processes == 1:
        found = [work(start, size) for start, size in zip(firsts, counts, strict=True)]
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(work, firsts, counts))
    return np.concatenate([tokens for tokens, _ in found]), sum(size for _, size in found)


def earlier(tokenizer: Path) -> np.ndarray:
    """Token ids of the first demo model's held-out answers, as documents of its recipe.

    A third of the stories are plain text; the other answers are chats of one to three turns, some with a system prompt.
    """
    rng = random.Random(1)
    rows = [json.loads(line) for line in gzip.decompress(EARLIER.read_bytes()).splitlines()]
    texts = []
    while rows:
        row = rows.pop()
        if row["kind"] == "story" and rng.random() < 1 / 3:
            texts.append(conversations.END + row["answer"])
            continue
        talk = conversations.Talk(rng, turns=[(row["request"], row["answer"])])
        while rows and rows[-1]["kind"] != "story" and len(talk.turns) < 3 and rng.random() < 0.4:
            row = rows.pop()
            talk.turns.append((row["request"], row["answer"]))
        if rng.random() < 0.1:
            talk.system = rng.choice(EARLIER_SYSTEM_PROMPTS)
        texts.append(conversations.END + conversations.written(talk))
    return tokens_of(texts, str(tokenizer))


def repetition(num_documents: int) -> dict[str, Any]:
    """How much the answers repeat themselves: what a model learns of it, it writes."""
    counts: Counter[str] = Counter()
    beginnings: Counter[str] = Counter()
    for number in range(num_documents):
        text = conversations.document(number)
        for answer in ANSWER.findall(text) or [text.removeprefix(conversations.END)]:
            counts["answers"] += 1
            counts["words"] += len(sentences.words_of(answer))
            counts["runs of four words said twice"] += sentences.repeats(answer)
            counts["empty answers"] += not answer.strip()
            counts["answers with a doubled word"] += bool(re.search(r"\b([a-z]+),? \1\b", answer))
            beginnings[" ".join(answer.split()[:4])] += 1
    share = counts["runs of four words said twice"] / counts["words"]
    return {**counts, "share of words": round(share, 5), "different beginnings of answers": len(beginnings)}


def write_data(out: Path, num_documents: int, num_heldout: int, processes: int) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    tokenizer = TOKENIZER / "tokenizer.json"
    figures: dict[str, Any] = {"documents": num_documents, "processes": processes}
    figures["vocab_size"] = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    for name, first, count in (("train", 0, num_documents), ("heldout", HELDOUT_FIRST, num_heldout)):
        tokens, characters = write(first, count, tokenizer, processes)
        np.savez(out / f"{name}.npz", tokens=tokens)
        figures[name] = {"documents": count, "tokens": len(tokens), "characters": characters}
    np.savez(out / "earlier.npz", tokens=earlier(tokenizer))
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(TOKENIZER / name, out / name)
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text()) | {"model_max_length": MAX_POSITION}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    figures["repetition"] = repetition(min(num_documents, 3000))
    figures["seconds"] = round(time.perf_counter() - started, 1)
    (out / "data.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=640_000, metavar="N", help="to train on (%(default)s)")
    parser.add_argument("--heldout", type=int, default=4000, metavar="N", help="held-out documents (%(default)s)")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1), metavar="N")
    options = parser.parse_args()
    print(json.dumps(write_data(options.out, options.documents, options.heldout, options.processes), indent=2))


if __name__ == "__main__":
    main()
