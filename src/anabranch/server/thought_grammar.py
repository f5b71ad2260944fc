"""Structured output of a model that thinks: the thought is free, what comes after it obeys the grammar.

Without this a model whose prompt has begun a thought could not end it, and its answer would be taken for one.
"""

from __future__ import annotations

import json
import re

from anabranch.sampling_params import Grammar
from anabranch.server.parsers import Parsers
from anabranch.server.parsers.lark import Rules


def after_thought(grammar: Grammar, parsers: Parsers, prompt: str) -> Grammar:
    """The grammar of the whole output; ValueError if there can be none."""
    thinking = parsers.thinking
    if thinking is None or thinking.is_over(prompt):
        return grammar
    rules = Rules(parsers.added_tokens)
    answer = _answer(grammar, rules)
    return Grammar(lark=rules.source(f"{thinking.grammar(rules, prompt)} {answer}"))


def _answer(grammar: Grammar, rules: Rules) -> str:
    if grammar.json_schema is not None:
        try:
            schema = json.loads(grammar.json_schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"grammar: json_schema is not JSON: {error}") from None
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("grammar: json_schema must be an object")
        return rules.json(schema)
    if grammar.regex is not None:
        slashes = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], grammar.regex, flags=re.DOTALL)
        return rules.terminal(f"/{slashes}/")
    if grammar.choice is not None:
        return rules.terminal(" | ".join(map(rules.text, grammar.choice)))
    raise ValueError(
        "a grammar in Lark cannot follow a thought: turn thinking off, as in "
        '"chat_template_kwargs": {"enable_thinking": false}, or use a regex or a JSON schema'
    )
