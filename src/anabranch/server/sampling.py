"""A request's sampling fields → SamplingParams, and the text its output must match → Grammar. For every dialect."""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from types import MappingProxyType
from typing import Any

import msgspec

from anabranch.sampling_params import Grammar, SamplingParams
from anabranch.server.errors import bad_request
from anabranch.server.protocol import ChatCompletion, ResponseFormat, Sampling

SAME_NAME = (
    ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    + ("n", "seed", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
    + ("prompt_logprobs", "return_routed_experts")
)
LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's fields before structured_outputs → its fields."""
OBJECT = {"type": "object"}


def sampling_params(body: Sampling, defaults: Mapping[str, Any] = MappingProxyType({}), **fixed: Any) -> SamplingParams:
    """`defaults` are the model's, for fields that the request leaves out. `fixed` are the dialect's: logprobs, grammar,
    and max_tokens where the request has none. A request may ask for more tokens than the context has room for: the
    engine ends the answer there, with finish_reason "length"."""
    given: dict[str, Any] = {**defaults}
    given |= {name: getattr(body, name) for name in SAME_NAME if getattr(body, name) is not None}
    given |= {name: tuple(value) for name in LISTS if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias is not None:
        if wrong := [token for token in body.logit_bias if not (token.isascii() and token.isdigit())]:
            raise bad_request(f"logit_bias: {wrong[0]!r} is not a token id", "logit_bias")
        given["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            "best_of must equal n: choosing among more answers than asked for is not supported", "best_of"
        )
    name = "max_tokens"
    if isinstance(body, ChatCompletion) and body.max_completion_tokens is not None:
        name = "max_completion_tokens"
    if (wanted := getattr(body, name)) is not None:
        fixed["max_tokens"] = wanted
    try:
        return SamplingParams(**given, **fixed)
    except ValueError as error:  # its message begins with the parameter's name
        message = str(error)
        if message.startswith("max_tokens"):
            message = message.replace("max_tokens", name, 1)
        raise bad_request(message, message.split(maxsplit=1)[0].rstrip(":")) from None


def grammar(body: Sampling) -> Grammar | None:
    """The grammar of the output, whichever field gives it; two fields contradict each other."""
    given: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and body.response_format.type != "text":
        given["response_format"] = {"json": _response_schema(body.response_format)}
    if body.structured_outputs is not None:
        given["structured_outputs"] = msgspec.structs.asdict(body.structured_outputs)
    given |= {name: {field: value} for name, field in GUIDED.items() if (value := getattr(body, name)) is not None}
    found: dict[str, Grammar] = {}
    for name, fields in given.items():
        try:
            found[name] = _grammar(**fields)
        except RecursionError:
            raise bad_request(f"{name}: the schema is too deeply nested", name) from None
        except ValueError as error:
            raise bad_request(str(error), name) from None
    if len(found) > 1:
        raise bad_request(f"{' and '.join(found)} contradict each other: give one of them", list(found)[1])
    return next(iter(found.values()), None)


def _response_schema(wanted: ResponseFormat) -> Any:
    if wanted.type == "json_object":
        return OBJECT
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise bad_request("response_format: json_schema needs a schema", "response_format.json_schema.schema")
    return wanted.json_schema.schema


def _grammar(
    json: Any = None,
    json_object: bool | None = None,
    grammar: str | None = None,
    disable_additional_properties: bool | None = None,
    **rest: Any,
) -> Grammar:
    """From the fields of structured_outputs."""
    schema = OBJECT if json is None and json_object else json
    if schema is not None and not isinstance(schema, str):
        schema = dumps(schema)
    return Grammar(json_schema=schema, lark=grammar, open_objects=disable_additional_properties is False, **rest)
