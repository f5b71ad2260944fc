"""Every bad value is refused when the parameters are made, by a ValueError that names the parameter and its range."""

from typing import Any

import pytest

from anabranch.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOPS, Grammar, SamplingParams

NAN, INFINITY, HUGE = float("nan"), float("inf"), 10**400
NO_NUMBERS: list[Any] = ["1", None, True, False, [1.0], 1j, NAN]
NO_INTEGERS: list[Any] = [*NO_NUMBERS, 1.0, 0.5, INFINITY]
NEITHER: list[Any] = [value for value in NO_INTEGERS if value is not None]
NO_IDS: list[Any] = [[-1], [1.0], ["1"], [True], [None], 5, "5", None, {5}]
NO_BIAS: list[Any] = [NAN, INFINITY, 101, -101, "1", True, None]

# Parameter → (values of the wrong type, values out of range, values that are right).
NUMBERS: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "temperature": (NO_NUMBERS, [-0.1, 100.1, INFINITY, -INFINITY, HUGE], [0, 0.0, 1, 1e-9, 100]),
    "top_p": (NO_NUMBERS, [0, 0.0, -0.1, 1.001, INFINITY], [1, 1.0, 1e-6]),
    "min_p": (NO_NUMBERS, [-0.1, 1.1, INFINITY], [0, 1, 0.5]),
    "presence_penalty": (NO_NUMBERS, [-2.1, 2.1, INFINITY, -INFINITY], [-2, 2, 0]),
    "frequency_penalty": (NO_NUMBERS, [-2.1, 2.1, INFINITY, -INFINITY], [-2, 2, 0]),
    "repetition_penalty": (NO_NUMBERS, [0, -1, 100.1, INFINITY], [0.01, 1, 100]),
    "top_k": (NO_INTEGERS, [-2], [-1, 0, 1, 10**9]),
    "seed": (
        NEITHER,
        [2**63, -(2**63) - 1],
        [None, 0, 2**63 - 1, -(2**63)],
    ),
    "n": (NO_INTEGERS, [0, -1, MAX_N + 1], [1, MAX_N]),
    "max_tokens": (NO_INTEGERS, [0, -1, 2**63, 10**400], [1, 10**9, 2**63 - 1]),
    "min_tokens": (NO_INTEGERS, [-1, 129], [0, 128]),
    "logprobs": (
        NEITHER,
        [-1, MAX_LOGPROBS + 1],
        [None, 0, MAX_LOGPROBS],
    ),
    "prompt_logprobs": (
        NEITHER,
        [-1, MAX_LOGPROBS + 1],
        [None, 0, MAX_LOGPROBS],
    ),
}
FLAGS = ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "return_routed_experts"]
OTHERS: dict[str, tuple[list[Any], list[Any]]] = {
    "stop": (
        [[""], [1], [None], 5, None, {"a"}, ["x"] * (MAX_STOPS + 1), b"x"],
        ["x", ["x", "yz"], (), ["x"] * MAX_STOPS],
    ),
    "bad_words": ([[""], [1], [None], 5, None, {"a"}], ["x", ["x y"], ()]),
    "stop_token_ids": (NO_IDS, [[0, 10**6], (), [3, 3]]),
    "allowed_token_ids": ([*(ids for ids in NO_IDS if ids is not None), [], ()], [[0, 10**6], None]),
    "logit_bias": (
        [{-1: 1.0}, {1.0: 1.0}, {"1": 1.0}, {True: 1.0}, [(1, 1.0)], None, 5, *({1: value} for value in NO_BIAS)],
        [{1: 100, 2: -100.0}, {}],
    ),
    "grammar": (["a", {"regex": "a"}, 5], [None, Grammar(regex="a")]),
}


def wrong_type() -> list[tuple[str, Any]]:
    return [(name, value) for name, (wrong, _, _) in NUMBERS.items() for value in wrong]


def out_of_range() -> list[tuple[str, Any]]:
    return [(name, value) for name, (_, outside, _) in NUMBERS.items() for value in outside]


def right() -> list[tuple[str, Any]]:
    numbers = [(name, value) for name, (_, _, good) in NUMBERS.items() for value in good]
    return numbers + [(name, value) for name, (_, good) in OTHERS.items() for value in good]


@pytest.mark.parametrize(("name", "value"), wrong_type(), ids=repr)
def test_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be (a number|an integer), not "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), out_of_range(), ids=lambda value: repr(value)[:20])
def test_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must (lie in|be in|be at least) .*\d.*, not "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None, NAN], ids=repr)
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be True or False, not "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (bad, _) in OTHERS.items() for value in bad])
def test_wrong_lists_and_tables(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), right())
def test_what_is_right_is_kept(name: str, value: Any) -> None:
    kept = getattr(SamplingParams(**{name: value}), name)
    if isinstance(kept, tuple):
        assert kept == ((value,) if isinstance(value, str) else tuple(value))
    else:
        assert kept == value and type(kept) is type(value)


def test_every_parameter_is_judged_here() -> None:
    assert {*NUMBERS, *FLAGS, *OTHERS} == set(SamplingParams.__dataclass_fields__)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="'temprature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_parameters_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"^min_tokens must be in \[0, 5\], not 6"):
        SamplingParams(min_tokens=6, max_tokens=5)
    with pytest.raises(ValueError, match="^stop strings need detokenize=True"):
        SamplingParams(stop=["a"], detokenize=False)


def test_greedy() -> None:
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy


@pytest.mark.parametrize(
    "fields",
    [{}, {"regex": "a", "lark": "b"}, {"choice": ()}, {"choice": ("a", "")}, {"choice": (1,)}, {"choice": "abc"}]
    + [{name: value} for name in ("regex", "lark", "json_schema") for value in (1, True, {"a": 1}, ["a"])],
)
def test_wrong_grammars(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="^grammar: "):
        Grammar(**fields)


def test_a_list_of_choices_can_be_a_key() -> None:
    """Grammars are kept by value."""
    assert hash(Grammar(choice=["a", "b"])) == hash(Grammar(choice=("a", "b")))  # type: ignore[arg-type]
