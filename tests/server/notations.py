"""Calls and thoughts as models write them, for tests of the parsers: notation by notation, after the real templates.

This file does not use the parsers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def mistral_list(calls: Sequence[Call]) -> str:
    with_ids = [_object(call)[:-1] + ', "id": "a1B2c3D4e"}' for call in calls]
    return f"[TOOL_CALLS][{', '.join(with_ids)}]"


def mistral_id(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{_json(arguments)}" for name, arguments in calls)


def mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def plain_json(calls: Sequence[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def plain_list(calls: Sequence[Call]) -> str:
    return f"[{', '.join(map(_object, calls))}]"


def gemma4(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>" for name, arguments in calls)


def qwen3_coder(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        parameters = [f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items()]
        texts.append(f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>")
    return "\n".join(texts)


def glm45(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in arguments.items()]
        texts.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join(texts)


def glm47(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        pairs = [f"<arg_key>{k}</arg_key><arg_value>{_plain(v)}</arg_value>" for k, v in arguments.items()]
        texts.append(f"<tool_call>{name}{''.join(pairs)}</tool_call>")
    return "".join(texts)


def minimax_m2(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        parameters = [f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in arguments.items()]
        texts.append(f'<invoke name="{name}">\n{"".join(parameters)}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def deepseek_v3(calls: Sequence[Call]) -> str:
    texts = [f"function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```" for name, arguments in calls]
    return _deepseek(texts, "\n")


def deepseek_v31(calls: Sequence[Call]) -> str:
    return _deepseek([f"{name}<｜tool▁sep｜>{_json(arguments)}" for name, arguments in calls], "")


def _deepseek(calls: Sequence[str], between: str) -> str:
    written = between.join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi_k2(calls: Sequence[Call]) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


WRITERS: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "hermes": ("hermes", hermes),
    "mistral, a list": ("mistral", mistral_list),
    "mistral, with ids": ("mistral", mistral_id),
    "mistral, by name": ("mistral", mistral_args),
    "plain JSON": ("json", plain_json),
    "plain JSON, a list": ("json", plain_list),
    "gemma4": ("gemma4", gemma4),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "glm45": ("glm45", glm45),
    "glm45, without line breaks": ("glm45", glm47),
    "minimax_m2": ("minimax_m2", minimax_m2),
    "deepseek": ("deepseek", deepseek_v31),
    "deepseek, fenced": ("deepseek", deepseek_v3),
    "kimi_k2": ("kimi_k2", kimi_k2),
}
"""Name → the parser that reads it, and who writes it."""

THOUGHTS = {
    "think": "<think>\n{}\n</think>\n\n",
    "gemma4": "<|channel>thought\n{}\n<channel|>",
    "mistral": "[THINK]{}[/THINK]",
    "none": "",
}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: Call, arguments: str = "arguments") -> str:
    return f'{{"name": {_json(call[0])}, "{arguments}": {_json(call[1])}}}'


def _gemma_value(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return f"{{{','.join(f'{key}:{_gemma_value(item)}' for key, item in value.items())}}}"
        case list():
            return f"[{','.join(map(_gemma_value, value))}]"
        case bool():
            return "true" if value else "false"
    return str(value)  # None too: the template does not know better


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _bare(value: Any) -> str:
    if isinstance(value, dict | list):
        return _json(value)
    return str(value)
