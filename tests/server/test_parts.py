"""The server's parts by themselves: bodies, sampling fields, conversations, histories, arrays."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.request import TokenLogprobs
from anabranch.sampling_params import Grammar, SamplingParams
from anabranch.server import history, protocol
from anabranch.server.body import decode
from anabranch.server.chat import read_messages
from anabranch.server.errors import ApiError, from_engine
from anabranch.server.openai import LogprobWriter, npy_base64
from anabranch.server.parsers.choose import find_parsers
from anabranch.server.protocol import sampling_params
from tests.text import tiny_tokenizers
from tests.text.test_chat_template import REAL_TEMPLATES
from tests.text.test_part_form import render

HELLO = [{"role": "user", "content": "hello"}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [field.name for field in msgspec.structs.fields(protocol.ChatCompletion)]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans())
def test_whatever_comes_is_read_or_refused(fields: dict[str, Any], with_messages: bool) -> None:
    body = fields | ({"messages": HELLO} if with_messages else {})
    try:
        read = decode(msgspec.json.encode(body), protocol.ChatCompletion)
        sampling_params(read, max_tokens=10)
    except ApiError as error:
        assert error.status == 400 and error.message
    else:
        assert "messages" in body


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as error:
        decode(data, protocol.Detokenize)
    assert error.value.status == 400


def test_sampling_fields_keep_their_values() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "seed": 3,
        "n": 2,
        "max_tokens": 99,
        "min_tokens": 3,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 5,
        "return_routed_experts": True,
    }
    lists = {"stop": ["a", "b"], "stop_token_ids": [1, 2], "bad_words": ["x"], "allowed_token_ids": [4]}
    body = {"prompt": "x", "logit_bias": {"3": -100}, "structured_outputs": {"choice": ["y"]}, **fields, **lists}
    read = decode(msgspec.json.encode(body), protocol.Completion)
    found = sampling_params(read, logprobs=2)
    assert found == SamplingParams(
        **fields,
        **{name: tuple(value) for name, value in lists.items()},
        logit_bias={3: -100.0},
        logprobs=2,
        grammar=Grammar(choice=("y",)),
    )
    # Every field of SamplingParams can be asked for, but for detokenize, which a text API has no use for.
    plain = SamplingParams()
    same = {name for name in SamplingParams.__slots__ if getattr(found, name) == getattr(plain, name)}
    assert same == {"detokenize"}


def test_max_completion_tokens_comes_first() -> None:
    body = {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 7}
    read = decode(msgspec.json.encode(body), protocol.ChatCompletion)
    assert sampling_params(read, max_tokens=1000).max_tokens == 7


def test_errors_of_the_engine_find_their_status() -> None:
    assert from_engine("internal error: KeyError: 'x'").status == 500
    too_long = from_engine("This model's maximum context length is 5 tokens. However")
    assert (too_long.status, too_long.code, too_long.param) == (400, "context_length_exceeded", None)
    refused = from_engine("grammar: regex cannot be used")
    assert (refused.status, refused.param, refused.message) == (400, "grammar", "grammar: regex cannot be used")


def test_a_message_with_half_a_surrogate_can_be_sent() -> None:
    assert b"?" in ApiError(400, "no \ud800 here", code=None).encoded()


def test_a_conversation_as_templates_want_it() -> None:
    given = [("1", "f", '{"a": 1}'), ("2", "g", "{broken"), ("3", "h", None), ("4", "i", "[1]")]
    calls = [
        protocol.ToolCall(id=id, function=protocol.FunctionCall(name=name, arguments=arguments))
        for id, name, arguments in given
    ]
    system, answer, result = read_messages(
        [
            protocol.Message(role="system", content="be brief"),
            protocol.Message(role="assistant", reasoning="hm", tool_calls=calls),
            protocol.Message(role="tool", tool_call_id="2", content="done"),
        ]
    )
    assert system == {"role": "system", "content": "be brief"}
    assert answer["content"] == "" and answer["reasoning"] == answer["reasoning_content"] == "hm"
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{"a": 1}, "{broken", {}, "[1]"]
    assert result == {"role": "tool", "content": "done", "tool_call_id": "2", "name": "g"}


NEEDS_DESCRIPTION = "{% for tool in tools %}{{ tool.function.description + '|' + tool | tojson }}{% endfor %}"
NEEDS_BOTH = NEEDS_DESCRIPTION + "{% for tool in tools %}{{ tool.function.parameters.properties | length }}{% endfor %}"
WRITES = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "members", "expected"),
    [
        (WRITES, {}, '{"type": "function", "function": {"name": "f"}}'),
        (NEEDS_DESCRIPTION, {}, '|{"type": "function", "function": {"name": "f", "description": ""}}'),
        (NEEDS_BOTH, {}, '|{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": '
         '"object", "properties": {}}}}0'),
        (NEEDS_BOTH, {"description": "d", "parameters": {"properties": {"a": {}}}},
         'd|{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"properties": {"a": {}}}'
         '}}1'),
    ],
)  # fmt: skip
def test_what_a_tool_leaves_out_is_added_where_a_template_needs_it(
    template: str, members: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "f", **members}}
    folder = tiny_tokenizers.write("llama", tmp_path / "llama")
    assert render(folder, template, [{"role": "user", "content": "Hi"}], tools=[tool]).text == expected


def test_a_template_that_fails_with_all_of_a_tool_gives_its_first_error(tmp_path: Path) -> None:
    template = NEEDS_BOTH + "{{ raise_exception('not today') }}"
    folder, hello = tiny_tokenizers.write("llama", tmp_path / "llama"), [{"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match="has no attribute 'description'"):
        render(folder, template, hello, tools=[{"type": "function", "function": {"name": "f"}}])


@pytest.mark.skipif(not REAL_TEMPLATES.exists(), reason="needs the real templates")
def test_gpt_oss_takes_a_tool_without_a_description(tmp_path: Path) -> None:
    folder = tiny_tokenizers.write("llama", tmp_path / "llama")
    template, tool = str(REAL_TEMPLATES / "openai-gpt-oss-120b.jinja"), {"type": "function", "function": {"name": "f"}}
    text = render(folder, template, [{"role": "user", "content": "Hi"}], tools=[tool]).text
    assert "// \ntype f = () => any;" in text


def test_one_call_if_only_one_is_wanted() -> None:
    from anabranch.server.parsers.parts import Content, ToolCallArguments, ToolCallBegin, ToolSpec

    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    parsers = find_parsers(None, "hermes", "none")
    for parallel, expected in ((True, 2), (False, 1)):
        reader = parsers.start([ToolSpec("f", {})], "auto", reasoning=True, parallel=parallel)
        parts = reader.feed("Well. " + text + "\n" + text, final=True)
        assert [part.name for part in parts if isinstance(part, ToolCallBegin)] == ["f"] * expected
        assert [part.text for part in parts if isinstance(part, ToolCallArguments)] == ['{"a": 1}'] * expected
        assert [part.text for part in parts if isinstance(part, Content)] == ["Well."]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from anabranch.text.grammar import GrammarCompiler
    from anabranch.text.tokenizer import Tokenizer
    from tools import tiny_model

    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_model.write_tokenizer(folder)
    return GrammarCompiler(Tokenizer(folder).backend, 257, [256])


def accepts(compiler: Any, wanted: Grammar, text: str) -> bool:
    """All of the text, and it may end there. Tokens are bytes here."""
    from tokenizers.pre_tokenizers import ByteLevel

    matcher = compiler.compile(wanted)
    id_of = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    ((symbols, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return all(matcher.accept(id_of[symbol]) for symbol in symbols) and bool(matcher.accept(256))


@pytest.mark.parametrize(
    ("wanted", "answer", "other"),
    [
        (Grammar(json_schema='{"enum": [{"a": 1}]}'), '{"a":1}', '{"a":2}'),
        (Grammar(regex="a/b|[/c]{2}"), "a/b", "a/c"),
        (Grammar(choice=("yes", 'n"o')), 'n"o', "no"),
    ],
)
def test_a_grammar_begins_after_the_thought(compiler: Any, wanted: Grammar, answer: str, other: str) -> None:
    thinks = find_parsers("<think></think>", "none", "auto")
    begun = thinks.after_thought(wanted, "user: hi\nassistant: <think>\n")
    assert accepts(compiler, begun, f"well, {other} is <not> it</think>\n\n{answer}")
    assert not accepts(compiler, begun, answer), "the thought must end first"
    assert not accepts(compiler, begun, f"so</think>{other}")
    free = thinks.after_thought(wanted, "user: hi\nassistant: ")
    assert accepts(compiler, free, f"<think>hm</think>{answer}") and accepts(compiler, free, answer)
    assert not accepts(compiler, free, f"hm</think>{answer}")
    for unchanged in (
        thinks.after_thought(wanted, "assistant: <think></think>\n"),
        find_parsers(None, "none", "none").after_thought(wanted, "assistant: "),
    ):
        assert unchanged == wanted


def test_a_lark_grammar_cannot_follow_a_thought() -> None:
    with pytest.raises(ValueError, match="enable_thinking"):
        find_parsers("</think>", "none", "think").after_thought(Grammar(lark='start: "x"'), "")


@given(st.integers(0, 4), st.integers(1, 3), st.integers(1, 3))
def test_routed_experts_are_read_by_numpy(num_tokens: int, num_layers: int, top_k: int) -> None:
    routed = [[[t + 10 * l + 100 * k for k in range(top_k)] for l in range(num_layers)] for t in range(num_tokens)]
    found = numpy.load(io.BytesIO(base64.b64decode(npy_base64(routed))))
    assert found.tolist() == routed
    assert not num_tokens or found.shape == (num_tokens, num_layers, top_k)


class Letters:
    """A tokenizer's spellings: token 200 on is half a character."""

    spellings = {False: {i: bytes([i]) for i in range(256)} | {300: b"a"}}


def test_the_best_token_is_the_maximum_whatever_tokens_look_like() -> None:
    writer = LogprobWriter(Letters())  # type: ignore[arg-type]
    # Token 300 looks like token 97, and is better.
    chosen = TokenLogprobs(97, -2.0, 2, ((300, -1.0), (98, -3.0)))
    best = TokenLogprobs(200, -0.5, 1, ((200, -0.5), (201, float("-inf"))))
    found = writer.completion([65, 97, 200], [None, chosen, best])
    assert found["token_logprobs"] == [None, -2.0, -0.5] and found["tokens"] == ["A", "a", "bytes:\\xc8"]
    assert max(found["top_logprobs"][1].values()) == -1.0 != found["token_logprobs"][1]
    assert max(found["top_logprobs"][2].values()) == found["token_logprobs"][2]
    assert min(found["top_logprobs"][2].values()) == -9999.0, "JSON has no infinity"
    assert found["text_offset"] == [0, 1, 2]


def test_balance() -> None:
    assert history.balance([5, 5, 5]) == 1.0
    assert history.balance([9, 0, 0]) == pytest.approx(1 / 3)
    assert history.balance([0, 0]) == 0.0 == history.balance([])


def test_history_keeps_rates_and_the_last_interval_of_experts() -> None:
    kept = history.History()
    kept.add({"generation_tokens": 10, "expert_load": [[1, 3]]})
    kept.add({"generation_tokens": 30, "expert_load": [[1, 3]]})
    assert kept.samples[-1]["generation_tokens_per_second"] > 0
    kept.add({"generation_tokens": 30, "expert_load": [[2, 9]]})
    assert kept.samples[-1]["generation_tokens_per_second"] == 0
    assert kept.experts()["interval"] == [[1, 6]] and kept.experts()["total"] == [[2, 9]]
    for seconds in (0.1, 0.2, 0.3, 10.0):
        kept.first_token(seconds)
    assert kept.percentiles(0.0, 0.5, 0.99) == [0.1, 0.3, 10.0]
    for _ in range(2 * history.KEPT):
        kept.add({})
    assert len(kept.samples) == history.KEPT
