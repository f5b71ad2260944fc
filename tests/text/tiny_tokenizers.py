"""Tokenizers of the kinds that models have, trained on a page of text and saved as transformers saves them.

    qwen     byte-level BPE
    llama    SentencePiece-like BPE with byte fallback: a text begins with a space that its decoder drops; has a bos
    gemma    the same without that space; has a bos
    unigram  SentencePiece-like Unigram with byte fallback and a Metaspace decoder; has an eos after the text
    words    whole words and no decoder: tokens are joined with spaces

This file knows nothing of anabranch.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

KINDS = ("qwen", "llama", "gemma", "unigram", "words")

CORPUS = [
    "An anabranch is a stream that leaves a river and joins it again further down.",
    "The river divides, the waters meet; 1234567890 fish, 3.14 boats & 2 rivers.",
    "Él bebió agua fría en el río; où est l'île? Größe, Straße, übermäßig.",
    "река течёт к морю и обратно не вернётся",
    "河川は海に流れる。漢字とひらがな、カタカナ。河流分开又汇合。",
    'for (int i = 0; i < n; ++i) {\n\tprintf("%d\\n", i);\n}\n\n    indented   text',
]
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TEXTS = [
    "",
    " ",
    "The river divides.",
    " leading and trailing ",
    "two  three   four    spaces\t\ttabs\n\n\nlines\r\n",
    "0 12 345 6789 3.14159 1,000,000",
    "Größe río où naïve Ångström",
    "e\u0301 a\u0308 n\u0303 \u1112\u1161\u11ab combining",
    "河川は海に流れる。漢字",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇨🇭 😶‍🌫️",
    "नमस्ते สวัสดี שלום مرحبا",
    "\x00\x01\x07\x1b[0m\x7f\x85\ufeff\u200b\u2028",
    "</s> in <s>the</s> middle <pad><unk> <|im_end|> <0x41> ▁ ▁▁",
    "def f(x):\n    return x**2  # comment\n",
    "\U0010ffff \ue000 �",
]


def write(kind: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    {"qwen": _qwen, "llama": _llama, "gemma": _gemma, "unigram": _unigram, "words": _words}[kind](folder)
    return folder


def _qwen(folder: Path) -> None:
    from transformers import Qwen2Tokenizer

    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw = _train(pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.ByteLevel.alphabet())
    vocabulary = raw["vocab"] | {token: len(raw["vocab"]) + i for i, token in enumerate(ends)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=raw["merges"], eos_token="<|im_end|>", extra_special_tokens=ends
    )
    _save(tokenizer, folder, "qwen3_moe")


def _llama(folder: Path) -> None:
    from transformers import LlamaTokenizer

    vocabulary, merges = _sentencepiece()
    _save(LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True), folder, "llama")


def _gemma(folder: Path) -> None:
    from transformers import GemmaTokenizer

    vocabulary, merges = _sentencepiece()
    _save(GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, **SPECIAL), folder, "gemma4_text")


def _unigram(folder: Path) -> None:
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=300, show_progress=False))
    pieces = [piece for piece in json.loads(trained.to_str())["model"]["vocab"] if piece[0] != "<unk>"]
    vocabulary = [(token, 0.0) for token in [*SPECIAL.values(), *_byte_tokens()]] + [tuple(piece) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    _save_plain(tokenizer, folder)


def _words(folder: Path) -> None:
    words = sorted({word for text in CORPUS for word in text.split()})
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    _save_plain(tokenizer, folder)


def _sentencepiece() -> tuple[dict[str, int], list[tuple[str, str]]]:
    raw = _train(pre_tokenizers.Metaspace(), [])
    tokens = [*SPECIAL.values(), *_byte_tokens()]
    ordered = sorted(raw["vocab"], key=raw["vocab"].__getitem__)
    return {token: i for i, token in enumerate([*tokens, *ordered])}, raw["merges"]


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _train(pre_tokenizer: Any, alphabet: list[str]) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def _save(tokenizer: Any, folder: Path, model_type: str) -> None:
    tokenizer.save_pretrained(folder)
    write_json(folder / "config.json", {"model_type": model_type})


def _save_plain(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", SPECIAL | {"tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(folder / "config.json", {"model_type": "llama"})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
