"""Plain data of this package: the parts that a reader gives, and the tools that a model may call."""

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
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments; None: the tool takes none."""


@dataclass(frozen=True, slots=True)
class Named:
    """The tool that must be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | Named
