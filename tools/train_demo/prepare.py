"""Step 2: from the teacher's text to what the model is trained on. Needs no GPU.

    python -m tools.train_demo.prepare TEXT... --out DATA

Drops duplicates, near-duplicates and answers with rare words, trains the tokenizer, writes the answers as documents
(plain stories, and chats of one to three turns), and cuts off a held-out part. DATA then holds train.npz and
heldout.npz (token ids), the tokenizer's files and data.json (what was dropped, sizes).
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.train_demo import sentences

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 4096
MAX_POSITION = 1024
SHINGLE = 5
MAX_SEEN = 0.5
"""An answer is a near-duplicate when more of the teacher's own runs of five words than this were seen before."""
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a kind storyteller.", "Answer in simple words.")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Row = dict[str, Any]


def read(paths: list[Path]) -> list[Row]:
    rows = [json.loads(line) for path in paths for line in gzip.decompress(path.read_bytes()).splitlines()]
    random.Random(0).shuffle(rows)
    return rows


def own_words(row: Row) -> str:
    """What the teacher added to the plan's words. Those repeat by design; two answers are alike if this is."""
    text = row["answer"]
    for given in row["given"]:
        text = text.replace(given, "\n", 1)
    return text


def drop_duplicates(rows: list[Row]) -> tuple[list[Row], Counter[str]]:
    kept: list[Row] = []
    counts: Counter[str] = Counter()
    exact: set[int] = set()
    seen: set[int] = set()
    for row in rows:
        key = hash((row["request"], row["answer"]))
        runs = [hash(run) for run in sentences.shingles(own_words(row), SHINGLE)]
        if key in exact:
            counts["duplicate"] += 1
        elif runs and sum(run in seen for run in runs) > MAX_SEEN * len(runs):
            counts["near-duplicate"] += 1
        else:
            kept.append(row)
            exact.add(key)
            seen.update(runs)
    return kept, counts


def drop_rare_words(rows: list[Row], min_count: int) -> list[Row]:
    """A small model cannot learn a word from one sentence, and a small teacher's rare words are often not words."""
    words = [set(sentences.words_of(row["answer"])) for row in rows]
    counts = Counter(word for found in words for word in found)
    return [row for row, found in zip(rows, words, strict=True) if all(counts[word] >= min_count for word in found)]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in (END, TURN, TURN_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A text begins as it does in training: behind the end of the one before.
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "bos_token": END,
        "eos_token": TURN_END,
        "pad_token": END,
        "additional_special_tokens": [TURN],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITION,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def documents(rows: list[Row], seed: int) -> list[str]:
    """A third of the stories as plain text; all else as chats, some of several turns, some with a system prompt."""
    rng = random.Random(seed)
    texts: list[str] = []
    left = list(rows)
    while left:
        row = left.pop()
        if row["kind"] == "story" and rng.random() < 1 / 3:
            texts.append(END + row["answer"])
            continue
        turns = [row]
        while left and left[-1]["kind"] != "story" and len(turns) < 3 and rng.random() < 0.4:
            turns.append(left.pop())
        text = _turn("system", rng.choice(SYSTEM_PROMPTS)) if rng.random() < 0.1 else ""
        text += "".join(_turn("user", turn["request"]) + _turn("assistant", turn["answer"]) for turn in turns)
        texts.append(END + text)
    return texts


def _turn(role: str, text: str) -> str:
    return f"{TURN}{role}\n{text}{TURN_END}\n"


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings])


def prepare(paths: list[Path], out: Path, vocab_size: int, min_count: int, heldout: float) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    rows = read(paths)
    figures: dict[str, Any] = {"answers_read": len(rows)}
    rows, dropped = drop_duplicates(rows)
    num_before = len(rows)
    rows = drop_rare_words(rows, min_count)
    figures["dropped"] = {**dropped, "rare word": num_before - len(rows)}
    figures["answers_by_kind"] = dict(Counter(row["kind"] for row in rows))
    num_heldout = max(1, round(len(rows) * heldout))
    parts = {"heldout": documents(rows[:num_heldout], 1), "train": documents(rows[num_heldout:], 2)}
    tokenizer = train_tokenizer([re.sub(r"<\|\w+\|>", "\n", text) for text in parts["train"]], vocab_size)
    write_tokenizer(tokenizer, out)
    figures |= {"vocab_size": tokenizer.get_vocab_size(), "characters": sum(map(len, parts["train"]))}
    for name, texts in parts.items():
        tokens = encode(tokenizer, texts)
        np.savez_compressed(out / f"{name}.npz", tokens=tokens)
        figures[name] = {"documents": len(texts), "tokens": len(tokens)}
    (out / "data.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="+", help="text-NN.jsonl.gz, as write_text leaves them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--min-count", type=int, default=5, metavar="N", help="answers a word must stand in")
    parser.add_argument("--heldout", type=float, default=0.01, metavar="SHARE")
    options = parser.parse_args()
    figures = prepare(options.text, options.out, options.vocab_size, options.min_count, options.heldout)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
