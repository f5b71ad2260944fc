"""Which replica gets a request, what replicas' numbers are together, and which options are refused. Without Ray."""

import random
import sys

import pytest

from anabranch.cli import main
from anabranch.replicas.config import ReplicaConfig
from anabranch.replicas.prefixes import BLOCK, Prefixes, block_hashes
from anabranch.stats import combined


def tokens(seed: int, num_blocks: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num_blocks * BLOCK)]


def send(prefixes: Prefixes[str], prompt: list[int], load: dict[str, int], salt: str = "") -> str:
    hashes = block_hashes(prompt, salt)
    chosen = prefixes.rank(hashes, load)[0]
    prefixes.note(hashes, chosen)
    return chosen


def test_a_number_stands_for_all_tokens_up_to_its_block() -> None:
    prompt, other = tokens(1, 3), tokens(2, 1)
    assert len(block_hashes(prompt + [1], "")) == 3
    assert block_hashes(prompt, "")[:2] == block_hashes(prompt[: 2 * BLOCK + 5], "")
    assert not set(block_hashes(prompt, "")) & set(block_hashes(other + prompt[BLOCK:], ""))
    assert not set(block_hashes(prompt, "")) & set(block_hashes(prompt, "salt"))
    assert block_hashes(prompt[: BLOCK - 1], "") == []


def test_prompts_go_where_their_prefix_is_and_others_are_spread() -> None:
    prefixes: Prefixes[str] = Prefixes(8)
    idle = dict.fromkeys("abc", 0)
    places = [send(prefixes, tokens(seed, 4), idle) for seed in range(6)]
    assert sorted(places) == sorted("aabbcc")
    for seed in (5, 0, 3, 1, 4, 2):
        assert send(prefixes, tokens(seed, 4) + tokens(100 + seed, 2), idle) == places[seed]


def test_the_longest_prefix_counts() -> None:
    prefixes: Prefixes[str] = Prefixes(8)
    prefixes.note(block_hashes(tokens(1, 2), ""), "a")
    prefixes.note(block_hashes(tokens(1, 2) + tokens(2, 1), ""), "b")
    assert send(prefixes, tokens(1, 2) + tokens(2, 3), {"a": 0, "b": 5}) == "b"
    assert send(prefixes, tokens(1, 2) + tokens(3, 1), {"a": 0, "b": 5}) == "a"  # as long in both: the less busy one


def test_the_imbalance_is_bounded() -> None:
    """All prompts begin alike and none ends: the replica that has seen them first has up to 4 more than the others."""
    prefixes: Prefixes[str] = Prefixes(4)
    load = {"a": 0, "b": 0, "c": 0}
    imbalances = []
    for seed in range(300):
        load[send(prefixes, tokens(0, 8) + tokens(seed, 1), load)] += 1
        imbalances.append(max(load.values()) - min(load.values()))
    assert max(imbalances) == 4


def test_the_busiest_come_last() -> None:
    assert Prefixes[str](2).rank([], {"a": 5, "b": 3, "c": 4}) == ["b", "c", "a"]


def test_the_least_recently_used_blocks_are_forgotten_from_their_end() -> None:
    prefixes: Prefixes[str] = Prefixes(8, max_blocks=6)
    first, second = block_hashes(tokens(1, 4), ""), block_hashes(tokens(2, 4), "")
    prefixes.note(first, "a")
    prefixes.note(second, "a")
    assert set(prefixes.noted["a"]) == {*first[:2], *second}
    prefixes.note(first[:2], "a")
    prefixes.note(block_hashes(tokens(3, 2), ""), "a")
    assert set(first[:2]) < set(prefixes.noted["a"]) and second[3] not in prefixes.noted["a"]


def test_a_replica_that_has_ended_is_forgotten() -> None:
    prefixes: Prefixes[str] = Prefixes(8)
    prefixes.note([1, 2], "a")
    prefixes.note([3], "b")
    prefixes.keep(["b", "c"])
    assert set(prefixes.noted) == {"b"} and prefixes.replicas == {"b", "c"}


def test_numbers_of_several_engines() -> None:
    def stats(number: int) -> dict[str, object]:
        return {
            "running": number,
            "kv_usage": number / 10,
            "max_model_len": 100 + number,
            "steps": 10 * number,
            "finished": {"stop": number, f"only {number}": 1},
            "queue_time_seconds": {"bounds": [0.1, 1.0], "counts": [number, 1, 0], "sum": 0.5},
            "expert_load": [[number, 1], [0, number]],
            "spec_decode_acceptance": 0.9,
            "spec_decode_draft_tokens": 4,
            "spec_decode_accepted_tokens": number,
            "name": "x",
        }

    assert combined([stats(1), stats(3)], ended=[stats(2)]) == {
        "running": 4,
        "kv_usage": 0.2,
        "max_model_len": 101,
        "steps": 60,
        "finished": {"stop": 6, "only 1": 1, "only 2": 1, "only 3": 1},
        "queue_time_seconds": {"bounds": [0.1, 1.0], "counts": [6, 3, 0], "sum": 1.5},
        "expert_load": [[6, 3], [0, 6]],
        "spec_decode_acceptance": 0.5,
        "spec_decode_draft_tokens": 12,
        "spec_decode_accepted_tokens": 6,
        "name": "x",
    }
    assert combined([{"expert_load": []}, {"expert_load": [[1]]}]) == {"expert_load": [[1]]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas 2 is less than --replicas 3"),
        (["--ray-address", "auto"], "give --replicas too"),
        (["--replicas", "2", "--ray-address", "ray://head:10001"], "not streamed through Ray Client"),
        (["--replicas", "-1"], "at least 1"),
        (["--replicas", "2", "--max-imbalance", "0"], "max_imbalance must be at least 1"),
        (["--replicas", "2", "--routing", "random"], "invalid choice"),
    ],
)
def test_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main.main(["serve", *flags]) != 0
    except SystemExit as end:
        assert end.code
    assert message in capsys.readouterr().err


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_AUTO_CONNECT", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")  # to be as before after the test
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "anabranch.replicas.client", raising=False)
    assert main.main(["serve", "--replicas", "2"]) != 0
    assert "pip install 'anabranch[ray]'" in capsys.readouterr().err


def test_as_many_as_asked_for() -> None:
    assert ReplicaConfig(replicas=2).most == 2
    assert ReplicaConfig(max_replicas=3).replicas == 1
    assert ReplicaConfig(replicas=2, max_replicas=4).most == 4
