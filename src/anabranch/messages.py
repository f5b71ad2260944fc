"""The messages between the server process and the engine process: msgspec structs as msgpack, tagged by name.

engine.worker and engine.client send them. Request, SamplingParams and Update are sent as they are. Decoding checks
every type and range and executes nothing. Only serving imports this file.
"""

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
    rebalance: bool = False
    """Experts are divided anew among ranks before that."""


class Stop(Message):
    """Abort everything, close the engine, exit 0."""


# -- from the engine ---------------------------------------------------------------------------------------------------


class Stage(Message):
    """The stage that the start has reached; `done` of `total` if it has parts."""

    name: str
    done: int = 0
    total: int = 0


class Ready(Message):
    stats: dict[str, Any]


class Updates(Message):
    """The updates of one step."""

    updates: list[Update]
    num_received: int
    """Messages the engine had received before that step: only requests whose Add is among them can have updates."""


class Stats(Message):
    ticket: int
    values: dict[str, Any]
    error: str | None = None


class Heartbeat(Message):
    """Contains durations, not times, because the clocks of two processes may differ."""

    num_received: int
    num_steps: int
    step_for: float | None
    """Seconds that the running step has taken; None between steps."""
    patience: float | None = None
    """See processes.patience."""


class Ended(Message):
    """The last message. Without an error, the engine was asked to stop."""

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
    """The id in a message that may be an Add: a request that cannot be decoded gets an answer too."""
    try:
        return _decode_add_id(frame).request.id
    except msgspec.MsgspecError:
        return None
