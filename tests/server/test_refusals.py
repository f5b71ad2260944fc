"""Bad input against a running server: each is refused by name, and the server is as it was before."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import NAME, Running, running

pytestmark = pytest.mark.usefixtures("unharmed")

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]
CONTEXT = 256
POOL_PAGES = 24


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    flags = (
        "--max-model-len",
        str(CONTEXT),
        "--max-num-seqs",
        "8",
        "--num-pages",
        str(POOL_PAGES),
        "--page-size",
        "16",
    )
    with running(model, *flags) as server:
        yield server


def check(answer: Any, status: int, code: str | None = None, param: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"] and answer.headers["content-type"] == "application/json"
    body = json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    if code is not None:
        assert body["error"]["code"] == code, body
    if param is not None:
        assert (body["error"]["param"] or "").split("[")[0].split(".")[0] == param, body
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(server: Running, path: str) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for body in (b"", b"{", b"[]", b"null", b'"text"', b"7", b'{"prompt": "\xff\xfe"}', b'{"a": NaN}', b"{} {}"):
            check(client.post(path, content=body, headers=JSON), 400, "invalid_json")
        for body in (b'{"prompt": "\\ud800"}', b'{"user": "\\udc00\\ud800"}', b'{"prompt": Infinity}', b"\x00"):
            check(client.post(path, content=body, headers=JSON), 400, "invalid_json")
        for body in (
            b'{"prompt": ' + b"[" * 100_000,
            b'{"metadata": ' + b'{"a":' * 100_000,
            b'{"n": ' + b"9" * 10_000 + b"}",
        ):
            check(client.post(path, content=body, headers=JSON), 400, "invalid_json")
        good = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
        for kind in ("text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"):
            check(client.post(path, content=good, headers={"content-type": kind}), 415, "invalid_json")
        check(client.post(path, content=good, headers=JSON | {"content-encoding": "gzip"}), 415, "invalid_json")


def test_routes_and_methods(server: Running) -> None:
    assert "/nowhere" in check(server.get("/nowhere"), 404, "not_found")
    check(server.get("/v1/chat/completions/x"), 404, "not_found")
    for path in (CHAT, COMPLETION, "/tokenize", "/detokenize"):
        answer = server.get(path)
        check(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == "POST"
        check(server.get(f"{path}/"), 405, "method_not_allowed")
        assert server.request("HEAD", path).status_code == 405
    check(server.post("/v1/models", {}), 405, "method_not_allowed")
    check(server.request("DELETE", "/health"), 405, "method_not_allowed")
    check(server.get("/%2e%2e/%2e%2e/etc/passwd"), 404, "not_found")


BIG = 10**400
NUMBERS: dict[str, list[Any]] = {
    "temperature": [-0.1, 101, BIG, True, "1", [], {}],
    "top_p": [0, -1, 1.5, True, "0.5"],
    "top_k": [-2, 1.5, True, "3", BIG],
    "min_p": [-0.1, 1.1, False],
    "presence_penalty": [-2.1, 2.1, True],
    "frequency_penalty": [-2.1, 2.1, "0"],
    "repetition_penalty": [0, -1, 101],
    "n": [0, -1, 129, 1.5, True, "2", BIG],
    "max_tokens": [0, -1, 1.0, True, "16", BIG],
    "min_tokens": [-1, 100, BIG],
    "seed": [2**63, -(2**63) - 1, 0.5, True, BIG],
    "priority": [2**40, 0.5, True],
    "prompt_logprobs": [-1, 257, True],
    "stream": [1, 0, "true"],
    "ignore_eos": [1, "yes"],
}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_numbers_out_of_range_and_of_other_types(server: Running, path: str) -> None:
    good = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    more = (
        {"max_completion_tokens": [0, -1, True, "16", BIG], "top_logprobs": [-1, 21, True]}
        if path == CHAT
        else {"logprobs": [-1, 257, True, 0.5]}
    )
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for name, values in (NUMBERS | more).items():
            for value in values:
                body = good | {"max_tokens": 5, name: value} | ({"logprobs": True} if name == "top_logprobs" else {})
                content = json.dumps(body)  # httpx's own would refuse 10^400
                check(client.post(path, content=content, headers=JSON), 400, param=name)


def test_lists_and_texts_over_their_caps(server: Running) -> None:
    cases: list[tuple[str, Any]] = [
        ("stop", ["x"] * 65),
        ("stop", "x" * 1025),
        ("stop", [""]),
        ("stop", [1]),
        ("stop_token_ids", [257]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 1025),
        ("logit_bias", {"257": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {str(i): 0 for i in range(1025)}),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 1025),
        ("allowed_token_ids", [257]),
        ("allowed_token_ids", [1.5]),
        ("cache_salt", "x" * 513),
        ("user", "x" * 513),
        ("prompt", ["x"] * 1025),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [""]),
        ("prompt", [[]]),
        ("prompt", [[1], "x", {}]),
        ("prompt", [1, 2, 257]),
        ("prompt", [-1]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", [[1, "2"]]),
        ("prompt", {"text": "x"}),
        ("suffix", "and then"),
        ("best_of", 3),
        ("stream_options", {"include_usage": True}),
        ("temprature", 0.5),
        ("response_format", {"type": "text", "strct": True}),
    ]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for name, value in cases:
            check(client.post(COMPLETION, json={"prompt": "x", "max_tokens": 4, name: value}), 400, param=name)
        message = check(client.post(COMPLETION, json={"prompt": "x", "temprature": 1}), 400, "unknown_parameter")
        assert "did you mean 'temperature'?" in message
        # 9 sequences run or wait at most in no server: refused for ever, so not with 429.
        check(client.post(COMPLETION, json={"prompt": ["x"] * 1000, "n": 100}), 400, param="n")


def test_unknown_model(server: Running) -> None:
    check(server.post(CHAT, {"model": "gpt-5", "messages": HELLO}), 404, "model_not_found", "model")
    check(server.post(COMPLETION, {"model": "", "prompt": "x"}), 404, "model_not_found", "model")
    check(server.get("/v1/models/a/b"), 404, "model_not_found")


def test_messages(server: Running) -> None:
    image = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    cases: list[tuple[Any, str]] = [
        ([], "messages"),
        ("hello", "messages"),
        ([{"content": "hello"}], "messages"),
        ([{"role": "wizard", "content": "hello"}], "messages"),
        ([{"role": "user"}], "messages"),
        ([{"role": "user", "content": image}], "messages"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages"),
        ([{"role": "user", "content": 7}], "messages"),
        ([{"role": "user", "content": "hello", "foo": 1}], "messages"),
        ([{"role": "user", "content": "x"}] * 4097, "messages"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages"),
    ]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for messages, param in cases:
            check(client.post(CHAT, json={"messages": messages, "max_tokens": 2}), 400, param=param)
        message = check(client.post(CHAT, json={"messages": [{"role": "user", "content": image}]}), 400)
        assert "text only" in message
        check(client.post(CHAT, json={"max_tokens": 2}), 400, param="messages")


def test_templates_do_not_come_with_requests(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for extra in (
            {"chat_template": "{{ 'x' * 10**10 }}"},
            {"chat_template_kwargs": {"messages": []}},
            {"chat_template_kwargs": {"tools": []}},
            {"chat_template_kwargs": {"chat_template": "x"}},
            {"chat_template_kwargs": {"raise_exception": "x"}},
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            {"chat_template_kwargs": {"bos_token": "x"}},
        ):
            for path in (CHAT, "/tokenize"):
                check(client.post(path, json={"messages": HELLO, **extra}), 400)
        refused = {"messages": HELLO, "chat_template_kwargs": {"refuse": True}}
        assert "refused by the template" in check(client.post(CHAT, json=refused), 400, param="messages")


def test_tools(server: Running) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [tool, tool]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [tool] * 257}, "tools"),
        ({"tools": [tool], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for extra, param in cases:
            check(client.post(CHAT, json={"messages": HELLO, "max_tokens": 2, **extra}), 400, param=param)


def test_the_context_ends_where_it_ends(server: Running) -> None:
    body = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    for length, fits in ((CONTEXT - 1, True), (CONTEXT, False), (CONTEXT + 1, False), (10 * CONTEXT, False)):
        for prompt in ("x" * length, [65] * length):
            answer = server.post(COMPLETION, body | {"prompt": prompt})
            if fits:
                assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == length, answer.text
            else:
                message = check(answer, 400, "context_length_exceeded", "prompt")
                assert f"This model's maximum context length is {CONTEXT} tokens" in message
    chat = [{"role": "user", "content": "x" * CONTEXT}]
    check(server.post(CHAT, {"messages": chat}), 400, "context_length_exceeded", "messages")
    check(server.post(CHAT, {"messages": chat, "stream": True}), 400, "context_length_exceeded", "messages")
    check(server.post(COMPLETION, {"prompt": ["x", "x" * 100_000]}), 400, "context_length_exceeded", "prompt")


@pytest.mark.parametrize("asked", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 64_000, 2**63 - 1])
def test_an_answer_is_clipped_to_what_the_context_leaves(server: Running, asked: int) -> None:
    """Whatever is asked for beyond it: usage and finish_reason say where the answer ended."""
    options = {"temperature": 0, "ignore_eos": True}
    whole = {"prompt": "x" * 250, "max_tokens": asked, **options}
    chat = {"messages": [{"role": "user", "content": "x" * 200}], **options}
    for path, body in (
        (COMPLETION, whole),
        (CHAT, chat | {"max_tokens": asked}),
        (CHAT, chat | {"max_completion_tokens": asked}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["total_tokens"] == CONTEXT, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    messages = [{"role": "user", "content": "x" * 200}]
    answer = server.post("/v1/messages", {"messages": messages, "max_tokens": asked, "temperature": 0})
    assert answer.status_code == 200, answer.text
    used, reason = answer.json()["usage"], answer.json()["stop_reason"]
    total = used["input_tokens"] + used["cache_read_input_tokens"] + used["output_tokens"]
    assert (reason, total) == ("max_tokens", CONTEXT) or (reason == "end_turn" and total < CONTEXT)


def test_a_huge_prompt_holds_nobody_up(server: Running) -> None:
    """Many long texts to tokenise, one after the other, and others are served meanwhile: not after them."""
    huge = "river " * 50_000
    with ThreadPoolExecutor(8) as pool:
        tokenised = [pool.submit(server.post, "/tokenize", {"prompt": huge}) for _ in range(6)]
        refused = [pool.submit(server.post, COMPLETION, {"prompt": huge}) for _ in range(2)]
        served = 0
        while not all(one.done() for one in tokenised):
            server.complete(max_tokens=1)
            served += 1
        assert [one.result().json()["count"] for one in tokenised] == [len(huge)] * 6
        for one in refused:  # by its characters, not by counting tokens
            assert f"{len(huge)} characters" in check(one.result(), 400, "context_length_exceeded")
    assert served > 4
    check(server.post("/tokenize", {"prompt": "x" * 1_000_000}), 400, "context_length_exceeded")
    check(server.post("/tokenize", {"prompt": "x" * 4_000_001}), 413, "body_too_large")


def test_grammars_that_cannot_be(server: Running) -> None:
    exploding = {"type": "object", "properties": {f"k{i}": {"type": "number", "multipleOf": 99991} for i in range(50)}}
    cases: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"json": {"type": "nonsense"}}},
        {"structured_outputs": {"grammar": "start: nothing"}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {}},
        {"structured_outputs": {"jsn": {}}},
        {"structured_outputs": {"json": exploding}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
    ]
    with httpx.Client(base_url=server.url, timeout=60) as client, ThreadPoolExecutor(1) as pool:
        for extra in cases:
            for stream in (False, True):
                other = pool.submit(server.complete)
                began = time.monotonic()
                check(client.post(CHAT, json={"messages": HELLO, "max_tokens": 9, "stream": stream, **extra}), 400)
                assert time.monotonic() - began < 20, extra  # two seconds of compiling, on a machine that does more
                other.result()


def chained(wrap: Callable[[Any], Any]) -> dict[str, Any]:
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(900)}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**definitions, "d900": {}}}


def test_deep_grammars_are_refused_and_nothing_ends(server: Running) -> None:
    """Each of these was the end of the engine."""
    chain = chained(lambda inner: inner)
    function = {"type": "function", "function": {"name": "f", "parameters": chain}}
    rules = "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(3000)), 'r3000: "b"'])
    cases: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": chained(wrap)}}}
        for wrap in (
            lambda inner: inner,
            lambda inner: {"anyOf": [inner, {"type": "null"}]},
            lambda inner: {"type": "array", "items": inner},
            lambda inner: {"allOf": [inner, {"type": ["object", "string"]}]},
        )
    ]
    cases += [{"tools": [function], "tool_choice": "required"}, {"guided_grammar": rules}]
    engine = server.engine.pid
    body = {"prompt": "A river", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server.url, timeout=60) as client, client.stream("POST", COMPLETION, json=body) as long:
        for extra in cases:
            check(client.post(CHAT, json={"messages": HELLO, "max_tokens": 9, **extra}), 400)
        message = {"messages": HELLO, "max_tokens": 9, "tools": [{"name": "f", "input_schema": chain}]}
        answer = client.post("/v1/messages", json={**message, "model": NAME, "tool_choice": {"type": "any"}})
        assert answer.status_code == 400, answer.text
        assert '"finish_reason":"length"' in long.read().decode()
    assert server.engine.pid == engine


def test_a_grammar_that_is_too_complex_is_over_when_it_is_refused(server: Running) -> None:
    """It took two seconds, and then a core and gigabytes for as long as it liked; the next grammar waited for it."""
    patterns = [{"type": "string", "pattern": f".*[a-z]{{{i % 7}}}x{i}.*"} for i in range(200)]

    def bad(seed: int) -> float:
        schema = {"allOf": [*patterns, {"type": "string", "pattern": f"x{seed}"}]}
        check(server.post(COMPLETION, {"prompt": "x", "max_tokens": 4, "guided_json": schema}), 400)
        return time.monotonic()

    server.complete(guided_regex="[a-z]{20}")
    memory = server.engine.memory_info().rss
    with ThreadPoolExecutor(3) as pool:
        over = [pool.submit(bad, seed) for seed in range(3)]
        time.sleep(0.3)
        server.complete(guided_regex="[a-z]{12}[0-9]")
        free = time.monotonic()
        assert free < min(future.result() for future in over)
    (trial,) = server.engine.children()
    assert trial.children() == [] and server.engine.memory_info().rss - memory < 100 << 20


def test_constraints_that_leave_no_token(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 4}
    check(server.post(COMPLETION, {**body, "allowed_token_ids": []}), 400, param="allowed_token_ids")
    a, b = (server.post("/tokenize", {"prompt": letter}).json()["tokens"] for letter in "ab")
    assert len(a) == len(b) == 1
    for extra, param, after in (
        ({"guided_regex": "[a]+", "bad_words": ["a"]}, "bad_words", 0),
        ({"guided_regex": "abab", "bad_words": ["ba"]}, "bad_words", 2),
        ({"guided_regex": "ba", "bad_words": ["x"], "allowed_token_ids": b}, "bad_words", 1),
        ({"guided_regex": "a", "allowed_token_ids": b}, "allowed_token_ids", 0),
        ({"guided_json": {"const": True}, "allowed_token_ids": [*a, *b]}, "allowed_token_ids", 0),
        ({"allowed_token_ids": b, "bad_words": ["b"]}, "bad_words", 0),
    ):
        message = check(server.post(COMPLETION, {**body, **extra}), 400, param=param)
        assert f"no token is allowed after {after} generated tokens" in message
        others = {"guided_regex": "grammar", "guided_json": "grammar"}
        assert all(others.get(name, name) in message for name in extra), message
        streamed = server.post(COMPLETION, {**body, **extra, "stream": True}).text
        assert '"finish_reason":"stop"' not in streamed and "no token is allowed" in streamed


def test_detokenize(server: Running) -> None:
    for tokens in ([257], [-1], [1.5], ["1"], "12", None, [True], [2**40]):
        check(server.post("/detokenize", {"tokens": tokens}), 400, param="tokens")
    check(server.post("/tokenize", {}), 400, param="prompt")
    check(server.post("/tokenize", {"prompt": "x", "messages": HELLO}), 400, param="prompt")


def test_more_than_the_pool_holds_is_computed_again(server: Running) -> None:
    """4 × 140 tokens want 36 pages of 24: requests are preempted, and all say what they say alone."""
    prompts = [f"{i} " * 20 for i in range(4)]
    alone = [server.complete(prompt, max_tokens=100) for prompt in prompts]
    before = server.stats()["preemptions"]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=100), prompts))
    assert together == alone
    assert server.stats()["preemptions"] > before


def test_a_prompt_larger_than_the_pool(model: Path) -> None:
    with running(model, "--num-pages", "4", "--page-size", "16") as small:
        message = check(small.post(COMPLETION, {"prompt": "x" * 200}), 400, "context_length_exceeded")
        assert "pool holds" in message and "2048" in message
        assert small.complete("x" * 20)
