"""A request's sampling fields → SamplingParams, and the text its output must match → Grammar. For every dialect."""

from __future__ import annotations

import json
from typing import Any

from anabranch.sampling_params import Grammar, SamplingParams
from anabranch.server.errors import ApiError, bad_request
from anabranch.server.protocol import ChatCompletion, Sampling

SAME_NAME = (
    ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    + ("n", "seed", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
    + ("prompt_logprobs", "return_routed_experts")
)
LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")


def sampling_params(body: Sampling, max_model_len: int, **fixed: Any) -> SamplingParams:
    """`fixed` are the dialect's: logprobs, grammar, and max_tokens where none was asked for."""
    given: dict[str, Any] = {name: getattr(body, name) for name in SAME_NAME if getattr(body, name) is not None}
    given |= {name: tuple(value) for name in LISTS if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias is not None:
        given["logit_bias"] = _logit_bias(body.logit_bias)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            "best_of must equal n: choosing among more answers than asked for is not supported", "best_of"
        )
    name, asked = _max_tokens(body)
    if asked is not None:
        if asked > max_model_len:
            raise bad_request(f"{name} is more than this model's context of {max_model_len} tokens", name)
        fixed["max_tokens"] = asked
    try:
        return SamplingParams(**given, **fixed)
    except ValueError as error:
        raise _named(error, name) from None


def _max_tokens(body: Sampling) -> tuple[str, int | None]:
    if isinstance(body, ChatCompletion) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        if not token.isascii() or not token.isdigit():
            raise bad_request(f"logit_bias: {token!r} is not a token id", "logit_bias")
        bias[int(token)] = value
    return bias


def _named(error: ValueError, max_tokens_name: str) -> ApiError:
    """SamplingParams' messages begin with the parameter's name."""
    param = str(error).split(maxsplit=1)[0].rstrip(":")
    message = str(error)
    if param == "max_tokens":
        message, param = message.replace("max_tokens", max_tokens_name, 1), max_tokens_name
    return bad_request(message, param)


def grammar(body: Sampling) -> Grammar | None:
    """What the output must match, from whichever field says it; more than one is a contradiction."""
    found: dict[str, Grammar] = {}
    try:
        if body.response_format is not None and body.response_format.type != "text":
            found["response_format"] = _response_format(body)
        if body.structured_outputs is not None:
            found["structured_outputs"] = _structured_outputs(body)
        if body.guided_json is not None:
            found["guided_json"] = Grammar(json_schema=_json(body.guided_json))
        if body.guided_regex is not None:
            found["guided_regex"] = Grammar(regex=body.guided_regex)
        if body.guided_choice is not None:
            found["guided_choice"] = Grammar(choice=tuple(body.guided_choice))
        if body.guided_grammar is not None:
            found["guided_grammar"] = Grammar(lark=body.guided_grammar)
    except (ValueError, RecursionError) as error:
        raise bad_request(str(error), "structured_outputs") from None
    if len(found) > 1:
        raise bad_request(f"{' and '.join(found)} contradict each other: give one of them", list(found)[1])
    return next(iter(found.values()), None)


def _response_format(body: Sampling) -> Grammar:
    wanted = body.response_format
    assert wanted is not None
    if wanted.type == "json_object":
        return Grammar(json_schema='{"type": "object"}')
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise bad_request("response_format: json_schema needs a schema", "response_format.json_schema.schema")
    return Grammar(json_schema=_json(wanted.json_schema.schema))


def _structured_outputs(body: Sampling) -> Grammar:
    wanted = body.structured_outputs
    assert wanted is not None
    schema = None if wanted.json is None else _json(wanted.json)
    if wanted.json_object:
        schema = '{"type": "object"}' if schema is None else schema
    choice = None if wanted.choice is None else tuple(wanted.choice)
    return Grammar(json_schema=schema, regex=wanted.regex, choice=choice, lark=wanted.grammar)


def _json(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
