"""An answer in the form of OpenAI's Responses: its items, and the events in which they grow.

Knows parts of an answer and no requests. Every event is one change of the response, which `response` holds as it is
after the last event: what a client puts together out of the events is what a client without a stream gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from anabranch.request import RequestOutput
from anabranch.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin

Event = dict[str, Any]
PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of an item → type of its text."""


class ResponseOutput:
    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        """With "output": [] at first."""
        self._num_events = 0
        self._open = False
        """The last item may still grow."""

    def start(self) -> list[Event]:
        """The first events, if they were not sent."""
        if self._num_events:
            return []
        return [self._event(f"response.{name}", response=self._now()) for name in ("created", "in_progress")]

    def feed(self, parts: Iterable[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            match part:
                case Content(text) if text:
                    events += self._grow("message", text)
                case Reasoning(text) if text:
                    events += self._grow("reasoning", text)
                case ToolCallBegin(_, id, name):
                    events += self._begin("function_call", "fc", call_id=id, name=name, arguments="")
                case ToolCallArguments(_, text) if text:
                    self._items[-1]["arguments"] += text
                    events.append(self._item_event("function_call_arguments.delta", delta=text))
        return events

    def finish(self, output: RequestOutput) -> list[Event]:
        (completion,) = output.completions
        is_whole = completion.finish_reason != "length"
        status = "completed" if is_whole else "incomplete"
        events = self._close(status)
        num_input, num_output = len(output.prompt_ids), len(completion.token_ids)
        self.response |= {
            "status": status,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": num_input,
                "input_tokens_details": {"cached_tokens": output.num_cached, "cache_write_tokens": 0},
                "output_tokens": num_output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_input + num_output,
            },
        }
        return [*events, self._event(f"response.{status}", response=self._now())]

    def fail(self, error: dict[str, Any]) -> list[Event]:
        """The last events, where the answer cannot be completed; `error` as OpenAI has it."""
        first = self.start()
        reason = {"code": error.get("code") or error.get("type"), "message": error["message"]}
        self.response |= {"status": "failed", "error": reason}
        return [*first, self._event("response.failed", response=self._now())]

    @property
    def _items(self) -> list[dict[str, Any]]:
        return self.response["output"]

    def _grow(self, type: str, text: str) -> list[Event]:
        """Add text to the last item if it has this type, or to a new one."""
        events: list[Event] = []
        if not (self._open and self._items[-1]["type"] == type):
            if type == "message":
                events = self._begin(type, "msg", role="assistant", content=[])
            else:
                events = self._begin(type, "rs", summary=[], content=[])
            part: dict[str, Any] = {"type": PART_TYPES[type], "text": ""}
            if type == "message":
                part |= {"annotations": [], "logprobs": []}
            self._items[-1]["content"].append(part)
            events.append(self._part_event("content_part.added", part=dict(part)))
        self._items[-1]["content"][0]["text"] += text
        return [*events, self._text_event("delta", delta=text)]

    def _begin(self, type: str, prefix: str, **fields: Any) -> list[Event]:
        """Close the last item and begin another."""
        events = self._close("completed")
        item = {"type": type, "id": f"{prefix}_{uuid4().hex}", "status": "in_progress", **fields}
        shown = {**item, "content": []} if "content" in item else dict(item)
        self._items.append(item)
        self._open = True
        return [*events, self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)]

    def _close(self, status: str) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item, events = self._items[-1], list[Event]()
        item["status"] = status
        if item["type"] == "function_call":
            events.append(self._item_event("function_call_arguments.done", arguments=item["arguments"]))
        else:
            part = item["content"][0]
            events += [self._text_event("done", text=part["text"]), self._part_event("content_part.done", part=part)]
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _text_event(self, name: str, **fields: Any) -> Event:
        type = self._items[-1]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if type == "message" else {}
        return self._part_event(f"{PART_TYPES[type]}.{name}", **fields, **logprobs)

    def _part_event(self, name: str, **fields: Any) -> Event:
        return self._item_event(name, content_index=0, **fields)

    def _item_event(self, name: str, **fields: Any) -> Event:
        number = len(self._items) - 1
        return self._event(f"response.{name}", item_id=self._items[number]["id"], output_index=number, **fields)

    def _event(self, type: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": type, "sequence_number": self._num_events - 1, **fields}

    def _now(self) -> dict[str, Any]:
        """The response as it is, for an event that is sent at once."""
        return {**self.response, "output": list(self._items)}
