"""How the tokens of a request are chosen. Values are checked on creation; errors name the parameter and its range.

Plain data, without torch or a tokenizer; sent between processes as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_LOGPROBS = 256
MAX_N = 128
MAX_STOPS = 64
LARGEST = 2**63 - 1  # a message between processes holds no larger integer
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "return_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the output must match: exactly one of json_schema, regex, lark and choice."""

    json_schema: str | None = None
    """A JSON schema as JSON text; "{}" allows any JSON value."""
    regex: str | None = None
    lark: str | None = None
    """A context-free grammar in llguidance's Lark dialect."""
    choice: tuple[str, ...] | None = None

    open_objects: bool = False
    """For JSON schemas: objects may have keys besides the properties they list, even without additionalProperties."""

    def __post_init__(self) -> None:
        given = [name for name in ("json_schema", "regex", "lark", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"grammar: give exactly one of json_schema, regex, lark, choice, not {given or 'none'}")
        for name in ("json_schema", "regex", "lark"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise ValueError(f"grammar: {name} must be text, not {text!r}")
        if self.choice is not None:
            choice = tuple(self.choice) if isinstance(self.choice, list | tuple) else ()
            if not choice or not all(isinstance(c, str) and c for c in choice):
                raise ValueError(f"grammar: choice must be a list of non-empty strings, not {self.choice!r}")
            object.__setattr__(self, "choice", choice)
        _flag("grammar: open_objects", self.open_objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """From the same logits a seed draws the same tokens, whatever else is in the batch. The last bits of the logits may
    depend on the rest of the batch, and then the tokens may too. The i-th of `n` samples uses seed + i, which wraps
    from 2**63 - 1 to -2**63."""
    n: int = 1
    max_tokens: int = 128
    """The limit of an answer, which then ends with "length"; so does one that reaches the end of the context."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    """None: all."""
    logprobs: int | None = None
    """The number of best alternatives to report for each generated token besides its own; 0: its own alone."""
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            object.__setattr__(self, name, _sequence(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            allowed = _sequence("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids must have at least one token id; leave it out to allow all")
            object.__setattr__(self, "allowed_token_ids", allowed)
        _number("temperature", self.temperature, 0, 100)
        _integer("top_k", self.top_k, -1, LARGEST)
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _integer("n", self.n, 1, MAX_N)
        _integer("max_tokens", self.max_tokens, 1, LARGEST)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in FLAGS:
            _flag(name, getattr(self, name))
        if len(self.stop) > MAX_STOPS or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be at most {MAX_STOPS} non-empty strings, not {self.stop!r}")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        if not all(isinstance(word, str) and word for word in self.bad_words):
            raise ValueError(f"bad_words must be non-empty strings, not {self.bad_words!r}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _integer(name, token, 0)
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token id", token, 0)
            _number("logit_bias", bias, -100, 100)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(f"grammar must be a Grammar, not {self.grammar!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{name} must be a number, not {value!r}")
    if not low <= value <= high or (open_low and value == low):
        raise ValueError(f"{name} must lie in {'(' if open_low else '['}{low}, {high}], not {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None or (high == LARGEST and value < low) else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {bound}, not {value!r}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) and name in ("stop", "bad_words"):
        return (value,)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list, not {value!r}")
    return tuple(value)
