"""What crosses the border between the serving process and the engine's: msgspec structs as msgpack, tagged by name.

Shapes only: who sends them when is engine.worker's and engine.client's. Request, SamplingParams and Update cross as
they are. Decoding checks every type and range; nothing that is decoded is executed. Only serving imports this file.
"""

from __future__ import annotations

from typing import Any

import msgspec

from anabranch.config import EngineConfig
from anabranch.request import INTERNAL as INTERNAL
from anabranch.request import Request, Update


class Message(msgspec.Struct, tag=str.lower):
    pass


# -- to the engine -----------------------------------------------------------------------------------------------------


class Start(Message):
    """The first message: what to build."""

    engine: str
    """module:function, called with the config and a progress callback."""
    config: EngineConfig
    log_level: int


class Add(Message):
    request: Request


class Abort(Message):
    id: str


class AskStats(Message):
    ticket: int


class Stop(Message):
    """Abort everything, close the engine, exit 0."""


# -- from the engine ---------------------------------------------------------------------------------------------------


class Stage(Message):
    """Start-up has come so far; done of total where a stage has parts."""

    name: str
    done: int = 0
    total: int = 0


class Ready(Message):
    stats: dict[str, Any]


class Updates(Message):
    """All that one step brought."""

    updates: list[Update]
    heard: int
    """Messages the engine had taken before that step: an update is of a request only if its Add is among them."""


class Stats(Message):
    ticket: int
    values: dict[str, Any]
    error: str | None = None


class Heartbeat(Message):
    """Durations, not times: clocks of two processes need not agree."""

    heard: int
    num_steps: int
    step_for: float | None
    """Seconds the step that is running now has taken; None between steps."""


class Ended(Message):
    """The last message. An error says why; without one it was meant."""

    error: str | None = None


Command = Start | Add | Abort | AskStats | Stop
Report = Stage | Ready | Updates | Stats | Heartbeat | Ended


class _RequestId(msgspec.Struct):
    id: str


class _AddId(msgspec.Struct, tag="add"):
    request: _RequestId


encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
_decode_add_id = msgspec.msgpack.Decoder(_AddId).decode


def request_id(frame: bytes) -> str | None:
    """Whose Add this is, if it is at least that: a request that cannot be read is answered all the same."""
    try:
        return _decode_add_id(frame).request.id
    except msgspec.MsgspecError:
        return None
