"""`anabranch bench serve` against our server, against others' habits on a real socket, and its arithmetic."""

# ruff: noqa: E402  (importorskip comes first: a machine without the server's packages skips this file)

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import pytest

for package in ("fastapi", "uvicorn", "h11", "msgspec", "zmq", "prometheus_client", "httpx", "psutil"):
    pytest.importorskip(package)

from anabranch.bench import serve, serve_figures
from anabranch.bench.serve_client import Client, Refused, Sent
from anabranch.bench.serve_load import Load, Prompt, file_prompts, random_prompts
from anabranch.cli.main import main
from tests.server.serving import NAME, QUICK, ROOT, Running, model, running

__all__ = ["model"]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(model, "--num-pages", "2000", "--max-num-seqs", "8", "--max-queue", "100", key="sesame") as server:
        yield server


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    return parser.parse_args(arguments)


def bench(server: Running, *arguments: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, "--api-key", "sesame", *arguments])


# -- our own server ---------------------------------------------------------------------------------------------------


def test_all_figures_under_their_usual_names(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "r.json", tmp_path / "r.svg"
    lengths = ("--random-input-len", "40", "--random-output-len", "12", "--num-prompts", "12")
    assert bench(server, *lengths, "--max-concurrency", "4", "--json", str(file), "--plot", str(picture)) == 0
    found = json.loads(file.read_text())
    assert found["completed"] == found["num_prompts"] == 12 and found["failed"] == 0
    assert found["total_input_tokens"] == 12 * 40, "token ids of the server's own: lengths are exact"
    assert found["total_output_tokens"] == 12 * 12
    assert found["output_throughput"] == pytest.approx(144 / found["duration"])
    assert found["total_token_throughput"] == pytest.approx(624 / found["duration"])
    assert found["request_throughput"] == pytest.approx(12 / found["duration"])
    assert found["max_concurrent_requests"] <= 4 and found["max_concurrency"] == 4
    assert found["request_rate"] == "inf" and found["model_id"] == NAME and found["tokens_counted_by"] == "server"
    for kind in ("ttft", "tpot", "itl", "e2el"):
        values = [found[f"{name}_{kind}_ms"] for name in ("median", "p90", "p95", "p99")]
        assert values == sorted(values) and values[0] >= 0, kind
    # On a busy machine several pieces may come at once: only these two are never 0.
    assert 0 < found["median_ttft_ms"] <= found["median_e2el_ms"]
    assert found["client_cpu_us_per_token"] > 0
    assert "sesame" not in file.read_text()
    shown = capsys.readouterr().out
    assert "12 answered, 0 failed" in shown and "144 out" in shown and f"{found['p99_ttft_ms']:,.2f}" in shown
    assert picture.read_text().count("requests running") == 1


def test_chats_at_a_rate(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    options = ("--endpoint", "chat", "--num-prompts", "8", "--request-rate", "20", "--random-range-ratio", "0.5")
    lengths = ("--random-input-len", "60", "--random-output-len", "10")
    assert bench(server, *options, *lengths, "--detailed", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert found["completed"] == 8 and found["request_rate"] == 20 and not any(found["errors"])
    assert all(5 <= length <= 15 for length in found["output_lens"]) and len(set(found["output_lens"])) > 1
    assert all(30 <= length <= 140 for length in found["input_lens"]), "text made to measure, and the template"
    assert found["start_times"] == sorted(found["start_times"])
    rng = random.Random(0)
    due = [0.0, *accumulate(rng.gammavariate(1.0, 1 / 20) for _ in range(7))]
    begun = [at - found["start_times"][0] for at in found["start_times"]]
    assert all(at >= planned - 0.01 for at, planned in zip(begun, due, strict=True)), "never before its time"
    for ttft, itls, latency in zip(found["ttfts"], found["itls"], found["latencies"], strict=True):
        assert ttft + sum(itls) == pytest.approx(latency)


@pytest.mark.slow
def test_failures_are_counted_with_their_reasons(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    with running(model, "--num-pages", "300", "--max-num-seqs", "1", "--max-queue", "1") as server:
        options = ["--base-url", server.url, "--num-prompts", "6", "--random-input-len", "8"]
        assert main(["bench", "serve", *options, "--random-output-len", "400", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["completed"], found["failed"]) == (2, 4), "one runs, one waits"
    assert "failed     4 × HTTP 429: the queue is full" in capsys.readouterr().out


def test_prompts_from_a_file(server: Running, tmp_path: Path) -> None:
    lines, file = tmp_path / "p.jsonl", tmp_path / "r.json"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rivers?"}]
    lines.write_text(json.dumps({"prompt": "hello", "max_tokens": 3}) + "\n\n" + json.dumps({"messages": messages}))
    options = ("--endpoint", "chat", "--dataset", str(lines), "--num-prompts", "5", "--random-output-len", "6")
    assert bench(server, *options, "--ignore-eos", "--num-warmups", "0", "--detailed", "--json", str(file)) == 0
    assert sorted(json.loads(file.read_text())["output_lens"]) == [3, 3, 3, 6, 6]


@pytest.mark.parametrize(
    ("line", "endpoint", "words"),
    [
        ("{", "chat", "line 1: not JSON"),
        ("[1]", "chat", "line 1: give an object with `prompt` or `messages`"),
        ('{"prompt": "a", "messages": []}', "chat", "one of them"),
        ('{"messages": []}', "completions", "are for --endpoint chat"),
        ('{"prompt": "a", "max_tokens": 0}', "chat", "max_tokens must be an integer from 1 on, not 0"),
        ("", "chat", "is empty"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, line: str, endpoint: str, words: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=words):
        file_prompts(file, endpoint, 3, 10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base-url", "http://127.0.0.1:1"], "no connection to 127.0.0.1:1"),
        (["--base-url", "ftp://host"], "is no address such as"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, not 0"),
        (["--request-rate", "0"], "--request-rate must be more than 0"),
        (["--random-range-ratio", "1"], "must lie in \\[0, 1\\)"),
        (["--model", "other"], "the first request failed.*HTTP 404: no model 'other'"),
        (["--api-key", "wrong", "--model", NAME], "the first request failed.*HTTP 401: the API key is wrong"),
        (["--extra-body", '{"n": -1}'], "the first request failed.*HTTP 400: n "),
        (["--random-input-len", "5000"], "HTTP 400: This model's maximum context length is 2048"),
    ],
)
def test_mistakes_are_named(
    server: Running, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert bench(server, *arguments) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert re.search(words, shown)


def test_extra_fields_are_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("[1]", "{"):
        with pytest.raises(SystemExit):
            main(["bench", "serve", "--extra-body", text])
        assert "--extra-body" in capsys.readouterr().err


def test_ctrl_c_shows_what_was_measured(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    command = [sys.executable, "-m", "anabranch.cli.main", "bench", "serve", "--base-url", server.url]
    command += ["--num-prompts", "500", "--max-concurrency", "2", "--random-input-len", "20", "--json", str(file)]
    before = sum(finished(server).values())
    environment = os.environ | {"ANABRANCH_API_KEY": "sesame", "PYTHONPATH": str(ROOT / "src")}
    # Whoever runs the tests in the background may have told them to ignore the signal, and children inherit that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=heed)
    try:
        server.until(lambda: sum(finished(server).values()) > before + 4, "nothing is answered")
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=QUICK)
    finally:
        process.kill()
    assert process.returncode == 130
    found = json.loads(file.read_text())
    assert found["interrupted"] and 0 < found["completed"] < 500 and found["failed"] == 0
    assert f"{found['completed']} answered" in shown and "of 500 requests; those in flight do not count" in shown
    server.until_idle()


def finished(server: Running) -> dict[str, float]:
    lines = server.get("/metrics").text.splitlines()
    return {line: float(line.split()[-1]) for line in lines if line.startswith("anabranch_request_success_total")}


# -- other servers' habits --------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(end: bytes = b"\n", **data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + 2 * end


def said(text: str | None = "word") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def against(answers: list[bytes | list[bytes]], num_requests: int = 1, close: bool = False) -> list[Sent]:
    """Requests one after the other, to a server that says just this; a list is written piece by piece."""

    async def talk() -> list[Sent]:
        left = list(answers)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while left:
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    break
                length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line)
                await reader.readexactly(length)
                assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
                answer = left.pop(0)
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if close:
                    break
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            client = Client(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/")
            found = [Sent() for _ in range(num_requests)]
            for sent in found:
                await client.stream("/v1/chat/completions", b"{}", sent)
                await asyncio.sleep(0.02)  # for a server to close what it no longer wants
            client.close()
        return found

    return asyncio.run(asyncio.wait_for(talk(), QUICK))


def test_usage_wins_over_counting() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}
    body = chunked(event(**said("")), event(**said()), event(**usage), b"data: [DONE]\n\n")
    (sent,) = against([HEAD + body])
    assert (sent.num_input, sent.num_output, sent.counted, sent.error) == (7, 9, True, "")
    assert len(sent.times) == 2


def test_without_usage_pieces_with_text_are_counted() -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    plain = {"choices": [{"index": 0, "text": " word"}], "usage": None}
    body = chunked(*(event(**one) for one in (said(""), said(), thought, plain, said(None))), b"data: [DONE]\n\n")
    (sent,) = against([HEAD + body])
    assert (sent.num_output, sent.counted, len(sent.times)) == (3, False, 5)


def test_however_the_stream_is_cut() -> None:
    """Comments, CRLF, several events in one piece, an event in several, a character in two."""
    stream = b": ping\r\n\r\n" + event(b"\r\n", **said("é")) + event(**said()) + event(**said()) + b"data: [DONE]\n\n"
    whole = HEAD + chunked(stream)
    pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    for answer in (whole, pieces, HEAD + chunked(*(stream[i : i + 5] for i in range(0, len(stream), 5)))):
        (sent,) = against([answer])
        assert (sent.num_output, sent.error) == (3, "")
    assert against([pieces])[0].itls[0] >= 0


def test_times_are_those_of_the_pieces() -> None:
    parts = [HEAD, *(b"%x\r\n%s\r\n" % (len(part), part) for part in [event(**said())] * 4), b"0\r\n\r\n"]
    (sent,) = against([parts])
    assert len(sent.itls) == 3 and sent.ttft > 0 and sent.ttft + sum(sent.itls) == pytest.approx(sent.e2el)
    assert sent.e2el > 0.02, "three pauses of 10 ms"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (HEAD + chunked(event(**said()), event(error={"message": "out of\n luck"})), "out of luck"),
        (b'HTTP/1.1 500 No\r\ncontent-length: 16\r\n\r\n{"detail": "no"}', "HTTP 500: no"),
        (b"HTTP/1.1 502 Bad\r\ncontent-length: 9\r\n\r\n<b>no</b>", "HTTP 502: <b>no</b>"),
        (HEAD + chunked(b"data: {nonsense\n\n"), "malformed"),
        (HEAD + b"5\r\nda", "peer closed connection without sending complete message body"),
        (HEAD + chunked(b"data: [DONE]\n\n"), "the answer was empty"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "illegal status line"),
    ],
)
def test_what_goes_wrong_is_told(answer: bytes, words: str) -> None:
    (sent,) = against([answer], close=True)
    assert words in sent.error


def test_connections_are_used_again_and_replaced_when_closed() -> None:
    good = HEAD + chunked(event(**said()))
    for close in (False, True):
        found = against([good] * 3, num_requests=3, close=close)
        assert [sent.error for sent in found] == [""] * 3
        assert [sent.num_output for sent in found] == [1] * 3


@pytest.mark.parametrize(
    ("arguments", "ignored"),
    [([], True), (["--no-ignore-eos"], None), (["--dataset", "f"], None), (["--dataset", "f", "--ignore-eos"], True)],
)
def test_bodies(arguments: list[str], ignored: bool | None) -> None:
    """What is not every server's is left out where nobody asks for it."""
    options = parse(*arguments, "--extra-body", '{"top_p": 0.5}')
    load = Load(Client("host"), options, "m", [])
    body = json.loads(load.body(Prompt({"prompt": "a"}, 7)))
    assert body.pop("ignore_eos", None) is ignored
    assert body.pop("stream_options") == {"include_usage": True}
    assert body == {"model": "m", "prompt": "a", "max_tokens": 7, "temperature": 0, "stream": True, "top_p": 0.5}


def test_prompts_for_a_server_that_does_not_tokenise() -> None:
    """Then prompts are words, about as many as make the length."""

    class Plain:
        async def json(self, *_: Any) -> Any:
            raise Refused("HTTP 404: not found")

    lengths = ("--random-input-len", "130", "--random-output-len", "5", "--random-prefix-len", "26")
    options = parse(*lengths, "--seed", "1")
    prompts = asyncio.run(random_prompts(Plain(), "m", 3, options))  # type: ignore[arg-type]
    words = [prompt.fields["prompt"].split() for prompt in prompts]
    assert [len(one) for one in words] == [120] * 3
    assert words[0][:20] == words[1][:20] == words[2][:20] and words[0] != words[1]
    again = asyncio.run(random_prompts(Plain(), "m", 3, options))  # type: ignore[arg-type]
    assert again == prompts


def test_random_prompts_that_would_all_be_equal_are_refused() -> None:
    """A tokenizer that knows none of the words: its token for unknown ones, and no other."""

    class Unknowing:
        async def json(self, *_: Any) -> Any:
            return {"tokens": [0] * 68}

    with pytest.raises(ValueError, match="all prompts would be equal.*--dataset FILE"):
        asyncio.run(random_prompts(Unknowing(), "m", 3, parse()))  # type: ignore[arg-type]


def test_warm_ups_run_at_once_after_the_first() -> None:
    """As many as in the load, with prompts of their own, and none of them counts."""
    running, most, seen, failing = 0, [0, 0], [], ""

    class Slow(Client):
        async def stream(self, path: str, body: bytes, sent: Sent) -> None:
            nonlocal running
            running += 1
            seen.append(json.loads(body)["prompt"])
            most[len(seen) > 1] = max(most[len(seen) > 1], running)
            await asyncio.sleep(0.01)
            running -= 1
            sent.error = "busy" if failing in seen else ""

    async def talk() -> Load:
        prompts = [Prompt({"prompt": str(i)}, 1) for i in range(12)]
        load = Load(Slow("host"), parse("--num-warmups", "9", "--max-concurrency", "4"), "m", prompts)
        await load.warm_up()
        assert seen == [str(i) for i in range(9)] and most == [1, 4] and load.done == []
        assert not await load.run()
        return load

    load = asyncio.run(talk())
    assert seen[9:] == ["9", "10", "11"] and len(load.done) == 3
    failing = "8"
    seen.clear()
    with pytest.raises(ValueError, match="warm-ups failed, so nothing was measured: busy"):
        asyncio.run(talk())


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_figures_are_numpys() -> None:
    rng = random.Random(3)
    sent = []
    for i in range(37):
        times = list(accumulate((rng.uniform(0.01, 0.2) for _ in range(rng.randint(1, 9))), initial=i * 0.1 + 0.3))
        sent.append(Sent(started=i * 0.1, times=times, num_input=10, num_output=2 * len(times), counted=True))
    sent.append(Sent(started=1.0, error="no"))
    found = serve_figures.figures(sent, 8.0, 0.5)
    done = sent[:-1]
    expected = {
        "ttft": [one.times[0] - one.started for one in done],
        "e2el": [one.times[-1] - one.started for one in done],
        "tpot": [(one.times[-1] - one.times[0]) / (2 * len(one.times) - 1) for one in done],
        "itl": [gap for one in done for gap in numpy.diff(one.times)],
    }
    for kind, seconds in expected.items():
        ms = 1e3 * numpy.array(seconds)
        assert found[f"mean_{kind}_ms"] == pytest.approx(ms.mean())
        assert found[f"median_{kind}_ms"] == pytest.approx(numpy.median(ms))
        assert found[f"std_{kind}_ms"] == pytest.approx(ms.std())
        for share in (90, 95, 99):
            assert found[f"p{share}_{kind}_ms"] == pytest.approx(numpy.percentile(ms, share))
    assert (found["completed"], found["failed"], found["total_input_tokens"]) == (37, 1, 370)
    assert found["client_cpu_share"] == 0.5 / 8
    grid = numpy.arange(0, 8, 0.001)
    running = [sum(one.started <= at < one.times[-1] for one in done) for at in grid]
    assert found["max_concurrent_requests"] == max(running)


def test_nothing_answered_is_no_division_by_zero() -> None:
    found = serve_figures.figures([Sent(error="no")], 1.0, 0.1)
    assert found["completed"] == 0 and found["mean_ttft_ms"] == 0 and found["output_throughput"] == 0
    assert "1 × no" in serve_figures.table(found, [Sent(error="no")])


@pytest.mark.parametrize("seconds", [0.01, 12.3, 1234.5, 1234567.8])
def test_columns_stay_apart_however_large_the_numbers(seconds: float) -> None:
    sent = [Sent(started=0.0, times=[seconds * (i + 1), seconds * 3], num_output=2) for i in range(3)]
    found = serve_figures.figures(sent, 3 * seconds, 0.1)
    lines = serve_figures.table(found, sent).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("ms "))
    table = [line[26:] for line in lines[begin : begin + 5]]
    assert {len(line) for line in table} == {len(table[0])}
    assert [len(line.split()) for line in table] == [5] * 5
    assert float(table[1].split()[0].replace(",", "")) == pytest.approx(found["mean_ttft_ms"], abs=0.01)


def test_the_client_takes_little_time() -> None:
    """A generous bound: it is about 50 µs a token, and an ordinary HTTP client takes 150."""
    num_tokens, num_streams = 400, 8
    body = HEAD + chunked(*[event(**said())] * num_tokens)
    began = time.process_time()
    found = against([body] * num_streams, num_requests=num_streams)
    assert [sent.num_output for sent in found] == [num_tokens] * num_streams
    assert (time.process_time() - began) / (num_tokens * num_streams) < 1e-3
