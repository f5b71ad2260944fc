"""Streamed text is the text decoded at once and cut at the first stop string, however the tokens arrive."""

import codecs
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.request import Update
from anabranch.sampling_params import SamplingParams
from anabranch.text import tokenizer as tokenizer_module
from anabranch.text.output import Answer, Detokenizer
from anabranch.text.tokenizer import Tokenizer
from tests.text import tiny_tokenizers
from tests.text.tiny_tokenizers import KINDS, TEXTS


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: Tokenizer(tiny_tokenizers.write(kind, root / kind)) for kind in KINDS}


def token_ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    """By their names in the vocabulary; bytes, which every kind but words has, as <0xE2>."""
    ids = []
    for token in tokens:
        token_id = tokenizer.backend.token_to_id(token)
        if token_id is None and (match := re.fullmatch("<0x(..)>", token)):
            byte = int(match[1], 16)
            token_id = next(i for i in range(tokenizer.vocab_size) if tokenizer.spellings[False][i] == bytes([byte]))
        assert token_id is not None, token
        ids.append(token_id)
    return ids


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text in single bytes: the hardest way to get it."""
    return token_ids(tokenizer, *(f"<0x{byte:02X}>" for byte in text.encode()))


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """Begin and end of the stop string that ends first, by trying every place."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), end
    return None


def cut(text: str, params: SamplingParams) -> str:
    found = first_stop(text, params.stop)
    return text if found is None else text[: found[params.include_stop_str_in_output]]


def certain(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> str:
    """The whole characters that these tokens spell."""
    return "".join(map(tokenizer.stream(params.skip_special_tokens).add, ids))


def without_possible_stop(text: str, stops: tuple[str, ...]) -> str:
    for begin in range(len(text)):
        if any(stop.startswith(text[begin:]) for stop in stops):
            return text[:begin]
    return text


@st.composite
def cases(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[list[int], list[int], SamplingParams]:
    """Token ids, sizes of the calls they come in, parameters whose stop strings are often in the text."""
    some_id = st.integers(0, tokenizer.vocab_size)
    some_text = st.sampled_from(TEXTS).map(lambda text: tokenizer.encode(text)[:12])
    pieces = draw(st.lists(some_text | st.lists(some_id, max_size=4), max_size=6))
    ids = [token_id for piece in pieces for token_id in piece]
    skip = draw(st.booleans())
    text = tokenizer.decode(ids, skip)
    stops = st.text(st.sampled_from("aeit \n�"), min_size=1, max_size=3)
    if text:
        begins = st.integers(0, len(text) - 1)
        stops |= st.tuples(begins, st.integers(1, 6)).map(lambda place: text[place[0] : place[0] + place[1]])
    params = SamplingParams(
        stop=tuple(draw(st.lists(stops, max_size=3))),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=skip,
    )
    return ids, draw(st.lists(st.integers(0, 5), max_size=len(ids))), params


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_in_any_calls(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]

    @settings(max_examples=150)
    @given(cases(tokenizer))
    def check(case: tuple[list[int], list[int], SamplingParams]) -> None:
        ids, sizes, params = case
        detokenizer = Detokenizer(tokenizer, params)
        pieces, begin = [], 0
        for size in [*sizes, len(ids)]:
            pieces.append(detokenizer.add(ids[begin : begin + size]))
            detokenizer.check()
            begin = min(begin + size, len(ids))
            if detokenizer.stopped is None:  # all that is certain is out, and no more
                text = certain(tokenizer, ids[:begin], params)
                assert "".join(pieces) == without_possible_stop(text, params.stop)
                assert detokenizer.num_tokens == begin
        stopped_early = detokenizer.stopped is not None
        pieces.append(detokenizer.finish())
        detokenizer.check()
        whole = tokenizer.decode(ids, params.skip_special_tokens)
        found = first_stop(whole, params.stop)
        assert "".join(pieces) == cut(whole, params)
        assert detokenizer.stopped == (None if found is None else whole[found[0] : found[1]])
        if stopped_early:
            prefixes = (certain(tokenizer, ids[:n], params) for n in range(len(ids) + 1))
            used = next(n for n, text in enumerate(prefixes) if first_stop(text, params.stop))
            assert detokenizer.num_tokens == used
            assert detokenizer.add(ids) == "" == detokenizer.finish() and detokenizer.num_tokens == used

    check()


@pytest.mark.parametrize("kind", ["qwen", "llama", "gemma", "unigram"])
def test_a_character_comes_out_with_its_last_byte(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    detokenizer = Detokenizer(tokenizers[kind], SamplingParams())
    ids = spelled(tokenizers[kind], "é河👩‍👦")
    pieces = [detokenizer.add([token_id]) for token_id in ids]
    assert pieces == ["", "é", "", "", "河", "", "", "", "👩", "", "", "\u200d", "", "", "", "👦"]
    assert detokenizer.finish() == "" and detokenizer.num_tokens == len(ids)


@pytest.mark.parametrize("kind", ["qwen", "llama", "gemma", "unigram"])
def test_bytes_that_are_no_character_do_not_block_the_stream(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    broken = token_ids(tokenizer, "<0xFF>")
    assert [detokenizer.add(broken) for _ in range(1000)] == ["�"] * 1000
    unfinished = token_ids(tokenizer, "<0xF0>", "<0x9F>")
    assert detokenizer.add(unfinished) == ""
    # Byte-level decoders write one U+FFFD for a character's beginning, byte fallback one for each of its bytes.
    expected = "�" if kind == "qwen" else "��"
    assert detokenizer.add(spelled(tokenizer, "a")) == expected + "a"
    assert detokenizer.add(unfinished) == ""
    assert detokenizer.finish() == expected
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["llama", "unigram"])
def test_the_space_a_text_begins_with(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("the river", add_special_tokens=False)
    assert "".join(map(Detokenizer(tokenizer, SamplingParams()).add, [[], ids[:1], ids[1:]])) == "the river"
    after_prompt = Detokenizer(tokenizer, SamplingParams(), continues=True)
    assert "".join(map(after_prompt.add, [ids[:1], ids[1:]])) == " the river"
    # A skipped token is not a beginning; one that is shown is.
    bos = token_ids(tokenizer, tokenizer.special_tokens["bos_token"])
    assert Detokenizer(tokenizer, SamplingParams()).add(bos + ids) == "the river"
    assert Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False)).add(bos + ids) == "<s> the river"


def test_special_tokens_are_skipped_or_not(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["qwen"]
    ids = [*tokenizer.encode("joins"), *token_ids(tokenizer, "<|im_end|>")]
    assert Detokenizer(tokenizer, SamplingParams()).add(ids) == "joins"
    assert Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False)).add(ids) == "joins<|im_end|>"
    stopped = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False, stop=("<|im_end|>",)))
    assert stopped.add(ids) == "joins" and stopped.stopped == "<|im_end|>" and stopped.num_tokens == len(ids)


def stream(tokenizer: Tokenizer, text: str, **params: object) -> tuple[list[str], Detokenizer]:
    """Character by character."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    pieces = [detokenizer.add(spelled(tokenizer, character)) for character in text]
    return [*pieces, detokenizer.finish()], detokenizer


def test_a_stop_string_is_never_emitted_half(tokenizers: dict[str, Tokenizer]) -> None:
    pieces, detokenizer = stream(tokenizers["qwen"], "ab\n\nUsUser:xyz", stop=("\n\nUser:",))
    assert pieces == ["a", "b", "", "", "", "", "\n\nUsU", "s", "e", "r", ":", "x", "y", "z", ""]
    assert detokenizer.stopped is None
    pieces, detokenizer = stream(tokenizers["qwen"], "ab\n\nUser:xyz", stop=("\n\nUser:",))
    assert pieces == ["a", "b", *[""] * 11]
    assert detokenizer.stopped == "\n\nUser:" and detokenizer.num_tokens == 9
    pieces, detokenizer = stream(tokenizers["qwen"], "ab\n\nUs", stop=("\n\nUser:",))
    assert pieces == ["a", "b", "", "", "", "", "\n\nUs"] and detokenizer.stopped is None


def test_a_stop_string_may_be_part_of_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    pieces, detokenizer = stream(tokenizers["qwen"], "one.two", stop=("e.",), include_stop_str_in_output=True)
    assert "".join(pieces) == "one." and detokenizer.stopped == "e."


@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_token_is_text_only_if_asked_for(tokenizers: dict[str, Tokenizer], shown: bool) -> None:
    tokenizer = tokenizers["qwen"]
    ids = [*tokenizer.encode("joins"), *token_ids(tokenizer, "<|im_end|>")]
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=shown)
    answer = Answer("request", [1], params, tokenizer)
    delta = answer.add(Update("request-0", ids, finish_reason="stop", stop_token=ids[-1]))
    assert delta.text == "joins" + "<|im_end|>" * shown and delta.token_ids == ids and answer.finished


@pytest.mark.parametrize(
    ("stops", "text", "stopped"),
    [
        (("abcd", "bc"), "xa", "bc"),  # ends first, though abcd begins first
        (("b", "xab"), "", "xab"),  # end together: the longest
        (("d", "c", "b"), "xa", "b"),
        (("bd", "abe", "xabcde"), "xabcd", None),
    ],
)
def test_the_first_of_several_stop_strings(
    tokenizers: dict[str, Tokenizer], stops: tuple[str, ...], text: str, stopped: str | None
) -> None:
    for order in (stops, stops[::-1]):
        pieces, detokenizer = stream(tokenizers["qwen"], "xabcd", stop=order)
        assert ("".join(pieces), detokenizer.stopped) == (text, stopped)


def test_a_token_may_go_past_the_stop_string(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["qwen"]
    ids = tokenizer.encode("the river divides")
    assert max(len(tokenizer.decode([token_id])) for token_id in ids) > 3
    for stop in ("iv", " r", "id"):
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=(stop,)))
        assert detokenizer.add(ids) == "the river divides".partition(stop)[0]
        assert stop in tokenizer.decode(ids[: detokenizer.num_tokens])
        assert stop not in tokenizer.decode(ids[: detokenizer.num_tokens - 1])


def test_min_tokens_let_a_stop_string_pass(tokenizers: dict[str, Tokenizer]) -> None:
    """One that they complete; one that a later token completes counts, wherever it began."""
    tokenizer = tokenizers["qwen"]
    assert "".join(stream(tokenizer, "a.b.c.d", stop=(".",), min_tokens=2)[0]) == "a.b"
    assert "".join(stream(tokenizer, "a.b.c.d", stop=(".",), min_tokens=4)[0]) == "a.b.c"
    assert "".join(stream(tokenizer, "a--b", stop=("--",), min_tokens=2)[0]) == "a"
    assert "".join(stream(tokenizer, "a--b", stop=("--",), min_tokens=3)[0]) == "a--b"
    pieces, detokenizer = stream(tokenizer, "aab", stop=("a", "aac"), min_tokens=2)
    assert pieces == ["", "", "aab", ""] and detokenizer.stopped is None
    assert stream(tokenizer, "xy!", stop=("y", "long one"), min_tokens=2)[0] == ["x", "y", "!", ""]  # not held either


def test_the_cost_of_a_token_does_not_grow(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizers["llama"]
    num_bytes = 0

    def counted(data: bytes, errors: str, final: bool) -> tuple[str, int]:
        nonlocal num_bytes
        num_bytes += len(data)
        return codecs.utf_8_decode(data, errors, final)

    monkeypatch.setattr(tokenizer_module, "codecs", SimpleNamespace(utf_8_decode=counted))
    ids = [token_id for text in TEXTS for token_id in tokenizer.encode(text)] * 20
    for stop in ((), ("\n\n\n\nnever", "河川は海に流れ去る")):
        num_bytes = 0
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stop))
        text = "".join(detokenizer.add([token_id]) for token_id in ids) + detokenizer.finish()
        assert detokenizer.num_tokens == len(ids) > 5000
        assert num_bytes < 2 * len(text.encode())  # a waiting byte is looked at again, at most three times
        detokenizer.check()


def test_a_stream_of_its_own(tokenizers: dict[str, Tokenizer]) -> None:
    """TextStream, which a Detokenizer is made of, for whoever needs no stop strings."""
    tokenizer = tokenizers["gemma"]
    ids = tokenizer.encode("joins 👩‍👦 it")
    text = tokenizer.stream()
    assert "".join([*map(text.add, ids), text.rest()]) == "joins 👩‍👦 it"
