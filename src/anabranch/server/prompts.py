"""Prompts that are no conversation, of completions and embeddings: text, token ids, or a list of either."""

from typing import Any

from anabranch.server.errors import bad_request
from anabranch.server.protocol import MAX_PROMPTS
from anabranch.server.service import Service
from anabranch.text.render_chat import Rendered


def split(given: Any, param: str) -> list[Any]:
    """A list of prompts, from one or several. `param` is the field that errors name."""
    is_one = isinstance(given, str) or not given or isinstance(given[0], int | float)
    prompts: list[Any] = [given] if is_one else given
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"{param}: {len(prompts)} prompts; at most {MAX_PROMPTS} go into one request", param)
    return prompts


def encode(
    service: Service, prompts: list[Any], add_special_tokens: bool, param: str, generates: bool = True
) -> list[list[int]]:
    """The token ids of each; for `prepare`. 400 for what is neither text nor token ids; takes time in proportion to the
    number of tokens."""
    for number, one in enumerate(prompts):
        if isinstance(one, str) and one:
            continue
        if not isinstance(one, list) or not one:
            empty = "is empty: give at least one token" if one in ("", []) else "must be text or token ids"
            raise bad_request(f"{param}[{number}] {empty}", param)
        service.check_length(len(one), param, generates)
        if not all(type(token) is int and 0 <= token < 2**31 for token in one):
            raise bad_request(f"{param}[{number}]: token ids must be integers from 0 on", param)
    return [
        service.encode(Rendered(one), add_special_tokens, param, generates=generates) if isinstance(one, str) else one
        for one in prompts
    ]
