"""The vocabulary of this room: what a reader gives, and the tools it is told of. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    index: int
    """Calls of one completion are counted from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    index: int
    text: str
    """A piece of JSON text."""


Part = Content | Reasoning | ToolCallBegin | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolSpec:
    name: str
    parameters: Mapping[str, Any] | None = None
    """A JSON schema of the arguments; None: the tool has none."""


@dataclass(frozen=True, slots=True)
class Named:
    """The tool that must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | Named
