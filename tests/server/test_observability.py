"""What those who run the server see: metrics, the last minutes, experts, logs. No prompt is in any of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import parser

from anabranch import __version__
from anabranch.server.history import Throughput
from tests.server.serving import NAME, Running, running

SECRET = "xyzzy-the-secret-word"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    flags = ("--metrics-compat", "vllm", "--log-format", "json", "--expert-load-interval", "2", "--num-pages", "300")
    flags += ("--quantization", "fp8")
    with running(model, *flags) as server:
        for number in range(3):
            server.complete(f"{SECRET} {number}", max_tokens=20)
        chat = {"messages": [{"role": "user", "content": SECRET}], "stop": SECRET, "n": 2, "max_tokens": 40}
        server.post("/v1/chat/completions", chat)
        server.post("/v1/completions", {"prompt": SECRET, SECRET: 1})
        server.post("/v1/completions", {"prompt": SECRET, "temperature": -1})
        server.get("/" + SECRET)
        yield server


def values(server: Running) -> dict[str, float]:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        sample.name + "".join(f"|{name}={sample.labels[name]}" for name in sorted(sample.labels)): sample.value
        for family in parser.text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics(server: Running) -> None:
    server.until_idle()
    found = values(server)
    label = f"|model_name={NAME}"
    for prefix in ("anabranch_", "vllm:"):
        assert found[f"{prefix}num_requests_running{label}"] == found[f"{prefix}num_requests_waiting{label}"] == 0
        assert found[f"{prefix}kv_cache_usage_perc{label}"] == 0
        assert found[f"{prefix}generation_tokens_total{label}"] >= 60
        assert found[f"{prefix}prompt_tokens_total{label}"] >= 3 * len(SECRET)
        assert found[f"{prefix}prefix_cache_queries_total{label}"] >= found[f"{prefix}prefix_cache_hits_total{label}"]
        assert found[f"{prefix}request_success_total|finished_reason=length{label}"] >= 3
        assert found[f"{prefix}num_preemptions_total{label}"] == 0
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
            name = f"{prefix}{name}_seconds"
            assert found[f"{name}_count{label}"] == found[f"{name}_bucket|le=+Inf{label}"] > 0
            assert found[f"{name}_sum{label}"] > 0
            buckets = [value for key, value in found.items() if key.startswith(f"{name}_bucket")]
            assert buckets == sorted(buckets)
    assert found["anabranch_http_responses_total|route=/v1/completions|status=200"] >= 3
    assert found["anabranch_http_responses_total|route=/v1/completions|status=400"] == 2
    assert found["anabranch_http_responses_total|route=unknown|status=404"] == 1
    assert found[f"anabranch_ready{label}"] == 1
    assert found[f"anabranch_model_info{label}|quantization=fp8"] == 1


def test_the_format_of_the_weights_is_named(server: Running) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert card["quantization"] == "fp8"
    assert re.search(r"ready after [\d.]+ s; context 2048 tokens, quantization fp8", server.log())


def test_drafts_are_counted_and_change_no_answer(server: Running, model: Path) -> None:
    repetitive = {"prompt": "aaaa", "max_tokens": 60, "logit_bias": {"97": 100}, "ignore_eos": True}
    bodies = [repetitive, {"prompt": "abcabc", "max_tokens": 40, "seed": 1, "stop": "b"}]

    def answers(server: Running) -> list[dict[str, object]]:
        found = [server.post("/v1/completions", body).json() for body in bodies]
        return [one["choices"] + [one["usage"]] for one in found]

    with running(model, "--speculative", "ngram", "--metrics-compat", "vllm", "--quantization", "fp8") as drafting:
        assert answers(drafting) == answers(server)
        drafting.until_idle()
        found = values(drafting)
    label = f"|model_name={NAME}"
    for prefix in ("anabranch_spec_decode", "vllm:spec_decode"):
        names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total", "draft_acceptance_rate")
        steps, drafts, accepted, rate = (found[f"{prefix}_{name}{label}"] for name in names)
        assert 10 < steps < drafts and 40 < accepted <= drafts and rate == pytest.approx(accepted / drafts)
    assert values(server)[f"anabranch_spec_decode_num_drafts_total{label}"] == 0


UNITS = ["s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"]
OTHER_UNITS = "milliseconds microseconds nanoseconds minutes hours days weeks kilobytes bits fahrenheit percent"


def lint(text: str) -> list[str]:
    """The complaints of `promtool check metrics`."""
    found = []
    helps = dict(re.findall(r"^# HELP (\S+) ?(.*)$", text, re.M))
    types = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M)
    if len(dict(types)) != len(types):
        found.append("a metric is there twice")
    for name, kind in types:
        words = name.lower().split("_")
        rules = {
            "no help": not helps.get(name, "").strip(),
            "a colon": ":" in name,
            "camel case": re.search("[a-z][A-Z]", name),
            "a counter must end with _total": kind == "counter" and not name.endswith("_total"),
            "_total of no counter": kind != "counter" and name.endswith("_total"),
            "a reserved ending": kind not in ("histogram", "summary") and name.endswith(("_count", "_sum", "_bucket")),
            "its type in its name": {"counter", "gauge", "histogram", "summary", "untyped"} & set(words),
            "an abbreviated unit": set(UNITS) & set(words[1:]),
            "no base unit": set(OTHER_UNITS.split()) & set(words),
            "a reserved label": kind == "gauge" and re.search(rf"^{name}{{.*\b(le|quantile)=", text, re.M),
        }
        found += [f"{name}: {rule}" for rule, broken in rules.items() if broken]
    return found


def test_metrics_are_named_as_promtool_wants_them(server: Running) -> None:
    text = server.get("/metrics").text
    own = [line for line in text.splitlines() if "vllm:" not in line]
    assert len(list(parser.text_string_to_metric_families("\n".join(own) + "\n"))) > 20
    assert not lint("\n".join(own))
    assert all(fault.startswith("vllm:") and fault.endswith("a colon") for fault in lint(text)) and lint(text)
    assert lint("# HELP a_ms x\n# TYPE a_ms counter\n# TYPE b gauge\n") == [
        "a_ms: a counter must end with _total", "a_ms: an abbreviated unit", "b: no help"
    ]  # fmt: skip


def test_what_the_log_says_about_the_last_seconds() -> None:
    throughput = Throughput(100.0)
    stats = {"running": 2, "waiting": 1, "prompt_tokens": 500, "generation_tokens": 250, "kv_usage": 0.5}
    stats |= {"prefix_queries": 400, "prefix_hits": 100}
    assert throughput.add(stats, 109.0) is None
    found = throughput.add(stats, 110.0)
    assert found == {
        "running": 2, "waiting": 1, "prompt_tokens_per_second": 50.0, "generation_tokens_per_second": 25.0,
        "kv_cache_usage": 0.5, "prefix_cache_hits": 0.25,
    }  # fmt: skip
    done = stats | {"running": 0, "waiting": 0, "generation_tokens": 270}
    assert (throughput.add(done, 130.0) or {})["generation_tokens_per_second"] == 1.0
    assert throughput.add(done, 140.0) is None, "nothing ran"
    assert throughput.add(done | {"waiting": 1}, 150.0) is not None


@pytest.mark.slow  # ten seconds
def test_the_log_says_how_much_is_done(server: Running) -> None:
    def line() -> bool:
        server.complete(max_tokens=20)
        return '"message": "throughput"' in server.log()

    server.until(line, "no line of throughput")
    found = [json.loads(text) for text in server.log().splitlines() if '"message": "throughput"' in text]
    assert any(one["generation_tokens_per_second"] > 0 for one in found)


def test_counts_go_up_by_what_was_done(server: Running) -> None:
    key = f"anabranch_generation_tokens_total|model_name={NAME}"
    before = values(server)[key]
    server.complete(max_tokens=7)
    server.until_idle()
    assert values(server)[key] == before + 7


def test_the_last_minutes(server: Running) -> None:
    server.until(
        lambda: (
            any(one["generation_tokens_per_second"] > 0 for one in server.stats()["samples"]) or not server.complete()
        ),
        "no rates",
    )
    found = server.stats()
    sample = found["samples"][-1]
    assert set(sample) >= {
        "time",
        "generation_tokens_per_second",
        "ttft_p50",
        "ttft_p99",
        "running",
        "waiting",
        "kv_usage",
    }
    assert 0 < found["ttft_seconds"]["p50"] <= found["ttft_seconds"]["p99"] < 90
    assert found["phase"] == "ready" and found["model"] == NAME


def test_experts(server: Running) -> None:
    server.complete(max_tokens=20)
    server.until(lambda: server.get("/debug/experts").json()["num_layers"], "no histogram")
    found = server.get("/debug/experts").json()
    assert found["num_layers"] == 4 and found["num_experts"] == 12
    for counts in ("total", "interval"):
        assert [len(row) for row in found[counts]] == [12] * 4
        sums = [sum(row) for row in found[counts]]
        assert len(set(sums)) == 1 and sums[0] > 0 and sums[0] % 4 == 0, (
            "each token goes to four experts in every layer"
        )
    assert all(0 < share <= 1 for share in found["balance_total"])
    before = sum(map(sum, found["total"]))
    server.complete("another prompt", max_tokens=40)
    server.until(lambda: sum(map(sum, server.get("/debug/experts").json()["total"])) > before, "it does not move")


def test_experts_on_one_rank_do_not_move(server: Running) -> None:
    assert server.get("/debug/experts").json()["ranks"] == []
    answer = server.post("/debug/experts")
    assert answer.status_code == 400 and "experts do not move here" in answer.json()["error"]["message"]
    server.complete(max_tokens=2)


@pytest.mark.slow
def test_experts_on_two_ranks_move(model: Path) -> None:
    """The operator says when; answers stay the same."""
    flags = ("--data-parallel-size", "2", "--expert-parallel", "--expert-copies", "1", "--dtype", "float32")
    with running(model, *flags, "--expert-load-interval", "1") as server:
        before = server.complete(max_tokens=40)
        first = server.post("/debug/experts").json()["ranks"]
        assert [[len(experts) for experts in layer] for layer in first] == [[7, 7]] * 4
        assert server.complete(max_tokens=40) == before
        for number in range(6):
            server.complete(f"another prompt {number}", max_tokens=10)
            server.post("/debug/experts")
        shown = server.get("/debug/experts").json()["ranks"]
        assert shown != [[[*range(7)], [*range(6, 12), 0]]] * 4, "as they were at the start"
        assert all({e for experts in layer for e in experts} == set(range(12)) for layer in shown)
        assert server.complete(max_tokens=40) == before


def test_version_openapi_and_page(server: Running) -> None:
    assert server.get("/version").json() == {"version": __version__}
    described = server.get("/openapi.json").json()
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = described["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert {"messages", "temperature", "tools", "return_routed_experts"} <= set(schema["properties"])
    page = server.get("/")
    assert page.status_code in (200, 404)
    assert page.headers["content-type"].startswith("text/html" if page.status_code == 200 else "application/json")


def test_logs_are_json_and_hold_no_prompt(server: Running) -> None:
    own = [json.loads(line) for line in server.log().splitlines()]  # the engine's process writes alike
    requests = [
        line for line in own if line["logger"] == "anabranch.server.access" and line["route"] == "/v1/completions"
    ]
    served = [line for line in requests if line["status"] == 200]
    assert served and all(re.match("req-", line["id"]) and line["seconds"] > 0 for line in requests)
    assert served[0]["prompt_tokens"] == len(SECRET) + 2 and served[0]["completion_tokens"] == 20
    assert any(line.get("error") == "unknown_parameter" for line in requests)
    stages = [line["message"] for line in own if re.match(r"  \S", line["message"])]
    assert any(line["logger"] == "anabranch.loader.resolve" for line in own), "nothing of the engine's"
    assert any("loading" in stage for stage in stages) and any("ready after" in line["message"] for line in own)
    assert SECRET not in server.log()
    assert SECRET not in server.get("/metrics").text + server.get("/debug/stats").text
