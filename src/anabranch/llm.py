"""The offline front door.

llm = LLM("path/or/hub-id")              # LLM(): the small model that comes with the package
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.text)
"""

from __future__ import annotations

import asyncio
import difflib
import gc
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from anabranch import bundled
from anabranch.config import EngineConfig
from anabranch.kernels.compiling import compile_server
from anabranch.models.generation import read_sampling_defaults
from anabranch.request import INTERNAL, Completion, RequestOutput, TokenLogprobs
from anabranch.sampling_params import Grammar, SamplingParams
from anabranch.stages import Stages, stage

if TYPE_CHECKING:
    from anabranch.engine.engine import Engine
    from anabranch.request import Update
    from anabranch.text.chat_template import ChatTemplate
    from anabranch.text.output import Answer, Delta

__all__ = ["LLM", "Completion", "Grammar", "RequestOutput", "SamplingParams", "TokenLogprobs"]

LONG_START = 10.0  # seconds
MANY_PROMPTS = 16
"""From so many on a call of `generate` may first spend a tenth of a second on what would have made many earlier steps
faster. There is no other moment for it: an LLM is never idle, its program is. With fewer it would be felt."""

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        show_progress: bool | None = None,
        stages: Stages | None = None,
        **options: Any,
    ) -> None:
        """`model` is a folder or a hub id; without one, the bundled model. `options` are EngineConfig's fields: dtype,
        max_model_len, max_num_seqs, ...

        `show_progress` (default: on a terminal) also shows where the time of the start went, of a short one only if
        asked for; a program that began for this LLM hands in `Stages.of_process()`, so that its imports count.
        """
        known = [field.name for field in fields(EngineConfig)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
                raise ValueError(f"unknown option {name!r}{hint}")
        if model is not None and not isinstance(model, str | os.PathLike):
            raise ValueError(f"model must be a folder or a hub id owner/name, not {_kind(model)}")
        config = EngineConfig(model=bundled.folder() if model is None else os.fspath(model), **options)
        self.show_progress = sys.stderr.isatty() if show_progress is None else show_progress
        self.stages = stages or Stages()
        with self.stages.shared():
            self.engine = self._start(config)
        gc.freeze()  # what is there now stays, and need not be searched for garbage in the middle of a step
        weakref.finalize(self, gc.unfreeze)  # then it is garbage
        self.stages.finish()
        assert self.stages.ready is not None
        if show_progress or (self.show_progress and self.stages.ready > LONG_START):
            print(self.stages.table(), file=sys.stderr, flush=True)
        self.tokenizer = self.engine.tokenizer
        self.sampling_defaults = read_sampling_defaults(self.engine.config.model, config.generation_config)
        """Fields of SamplingParams that the model's generation_config.json gives."""
        self._ids = itertools.count()
        self._streams: dict[str, asyncio.Queue[Any]] = {}
        self._pump: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._between_steps = asyncio.Lock()
        """Of `_loop`. Streams' steps run in a thread; requests join and leave only between them."""
        self._stepping = threading.Lock()
        self._leaving: list[str] = []
        """Requests to abort when the step that runs has ended."""
        self._template: ChatTemplate | None = None

    def _start(self, config: EngineConfig) -> Engine:
        compile_server.start_early()  # before torch is imported: its own import runs beside
        with stage("import"):
            from anabranch.engine.engine import make_engine
            from anabranch.engine.progress import Bar
        try:
            return make_engine(config, Bar("loading weights") if self.show_progress else None)
        finally:
            compile_server.close()

    @property
    def default_params(self) -> SamplingParams:
        """SamplingParams of this model: with the temperature, top_k, top_p, min_p and repetition_penalty of its
        generation_config.json, unless the option `generation_config` is "none". To change a field, use
        `dataclasses.replace(llm.default_params, max_tokens=64)`."""
        return SamplingParams(**self.sampling_defaults)

    def _params(self, params: Any) -> SamplingParams:
        return self.default_params if params is None else _check_params(params)

    # -- batches -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Iterator[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue prompts (text, or token ids; one, a list or a generator of them), one answer each, in their order.
        Without `params`, `default_params` are used; those given are taken as they are. Bad input raises ValueError, and
        nothing of the call is left behind. An answer that the engine could not complete because the model gave NaN has
        the finish_reason "error", and the log has a line about it; the other answers are not affected."""
        if self._pump is not None and not self._pump.done():
            raise RuntimeError("streams are running on this LLM: wait for them, or use a stream here too")
        many = _several(prompts)
        chosen = [self._params(one) for one in params] if isinstance(params, list | tuple) else None
        if chosen is None:
            chosen = [self._params(params)] * len(many)
        if len(chosen) != len(many):
            raise ValueError(f"{len(many)} prompts, but {len(chosen)} SamplingParams: give one, or one for each")
        if len(many) >= MANY_PROMPTS:
            self.engine.idle(waiting=True)
        answers: list[Answer] = []
        updates: list[Update] = []
        left = self.engine.config.max_num_batched_tokens
        try:
            for number, (prompt, one) in enumerate(zip(many, chosen, strict=True)):
                try:
                    answers.append(self._add(prompt, one, priority=priority, cache_salt=cache_salt))
                except ValueError as error:
                    raise (ValueError(f"prompt {number}: {error}") if len(many) > 1 else error) from None
                was, left = left, left - len(answers[-1].requests[0].prompt_ids)
                if left <= 0 < was:  # the first step is full: it runs while the others are added
                    updates += self.engine.step()
        except BaseException:
            self._abort(answers)
            raise
        self._run(answers, updates)
        for number, answer in enumerate(answers):
            if refused := [error for error in answer.errors if not error.startswith(INTERNAL)]:
                raise ValueError(f"prompt {number}: {refused[0]}")
        return [answer.output for answer in answers]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several."""
        if not _is_list(messages):
            raise ValueError(f"messages must be a list of messages, or of such lists, not {_kind(messages)}")
        given: list[Any] = list(messages)
        if not given:
            raise ValueError("messages is empty: give at least one")
        many = [given] if isinstance(given[0], Mapping) else given
        prompts = [self.render(conversation, tools, **template_options) for conversation in many]
        return self.generate(prompts, params)

    def render(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **template_options: Any
    ) -> list[int]:
        """A conversation as the model's chat template writes it, in token ids, ready for the answer. Special tokens
        that a message spells out, such as <|im_end|>, are text."""
        from anabranch.text.chat_template import NO_TOOLS, ChatTemplate
        from anabranch.text.special_text import render_chat

        if not _is_list(messages):
            raise ValueError(f"a conversation must be a list of messages, not {_kind(messages)}")
        if tools is not None and not _is_list(tools):
            raise ValueError(f"tools must be a list of tools, not {_kind(tools)}")
        if self.tokenizer is None:
            raise ValueError("the model folder has no tokenizer.json: a chat needs one")
        if self._template is None:
            self._template = ChatTemplate(self.engine.config.model)
        if tools and not self._template.writes_tools:
            raise ValueError(NO_TOOLS)
        given = list(tools) if tools else None
        rendered = render_chat(self._template, self.tokenizer, list(messages), given, **template_options)
        return self.tokenizer.encode(rendered.text, False, rendered.plain)

    def _add(self, prompt: Prompt, params: SamplingParams, **options: Any) -> Answer:
        from anabranch.text.output import Answer

        self._settle()
        _check_options(**options)
        text: str | None = None
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty: give at least one character")
            if self.tokenizer is None:
                raise ValueError("the model folder has no tokenizer.json: give token ids instead of text")
            text, ids = prompt, self.tokenizer.encode(prompt)
        elif _is_list(prompt):
            ids = list(prompt)
        else:
            raise ValueError(f"a prompt must be text or a list of token ids, not {_kind(prompt)}")
        kinds = set(map(type, ids))  # few, where tokens are many
        if bool in kinds or not all(issubclass(kind, int) for kind in kinds):
            raise ValueError("a prompt of token ids must hold integers only")
        answer = Answer(str(next(self._ids)), ids, params, self.tokenizer, text, arrival=time.monotonic(), **options)
        try:
            for request in answer.requests:
                self.engine.add(request)
        except BaseException:
            self._abort([answer])
            raise
        return answer

    def _abort(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            for request in answer.requests:
                self.engine.abort(request.id)

    def _run(self, answers: Sequence[Answer], updates: Sequence[Update] = ()) -> None:
        """Step until all have finished; `updates` came before."""
        from anabranch.engine.progress import Counter

        by_request = {request.id: answer for answer in answers for request in answer.requests}
        shown = Counter("prompts", len(answers)) if self.show_progress else None
        left = len(answers)
        try:
            while left:
                for update in updates:
                    answer = by_request.get(update.id)
                    if answer is None or answer.finished:
                        continue
                    answer.add(update)
                    if answer.to_abort(update):
                        self.engine.abort(update.id)
                    left -= answer.finished
                    if shown is not None:
                        shown(len(answers) - left, len(update.token_ids))
                updates = self.engine.step() if left else ()
        except BaseException:  # Ctrl-C above all: nothing of this call may linger in the engine
            self._abort(answers)
            raise

    # -- streams -------------------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """An async iterator of Deltas (index, text, token_ids, completion) as they come. Leaving it early aborts the
        request. Several streams may run at once in one event loop; they share the engine's batches."""
        return Stream(self, prompt, self._params(params), options)

    async def _open(self, prompt: Prompt, params: SamplingParams, options: dict[str, Any]) -> Answer:
        """Add a stream's request between two steps, and see to it that steps are made."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._between_steps = loop, asyncio.Lock()
        async with self._between_steps:
            answer = self._add(prompt, params, **options)
        return answer

    def _watch(self, answer: Answer, queue: asyncio.Queue[Any]) -> None:
        for request in answer.requests:
            self._streams[request.id] = queue
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._step_for_streams())

    async def _step_for_streams(self) -> None:
        try:
            while self._streams and self.engine.has_work:
                async with self._between_steps:
                    updates = await asyncio.to_thread(self._step)
                    self._settle()
                for update in updates:
                    if update.id in self._streams:
                        self._streams[update.id].put_nowait(update)
        except Exception as error:  # the engine broke: whoever waits must hear of it
            for queue in self._streams.values():
                queue.put_nowait(error)

    def _step(self) -> list[Update]:
        with self._stepping:
            return self.engine.step()

    def _leave(self, ids: list[str]) -> None:
        self._leaving += ids
        self._settle()

    def _settle(self) -> None:
        """Unless a step is running: then it is done after it."""
        if self._leaving and self._stepping.acquire(blocking=False):
            try:
                while self._leaving:
                    self.engine.abort(self._leaving.pop())
            finally:
                self._stepping.release()

    def stats(self) -> dict[str, Any]:
        """The engine's numbers, and where the time of the start went."""
        self._settle()
        return {**self.engine.stats(), "startup": self.stages.as_dict()}

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """Deltas of one answer. However it is left (the end, `break`, `aclose`, an exception), its requests go with it."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams, options: dict[str, Any]) -> None:
        self.llm = llm
        self.arguments = prompt, params, options
        self.answer: Answer | None = None
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self.answer is None:
            self.answer = await self.llm._open(*self.arguments)
            self.llm._watch(self.answer, self.queue)
        if self.answer.finished:
            self.close()
            raise StopAsyncIteration
        update = await self.queue.get()
        if isinstance(update, BaseException):
            raise update
        delta = self.answer.add(update)
        if self.answer.errors:
            self.close()
            raise ValueError(self.answer.errors[0])
        if self.answer.to_abort(update):
            self.llm._leave([update.id])
        return delta

    def close(self) -> None:
        if self.answer is not None:
            ids = [request.id for request in self.answer.requests if self.llm._streams.pop(request.id, None)]
            self.llm._leave(ids)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | Iterator) and not isinstance(value, str | bytes | bytearray)


def _several(prompts: Any) -> list[Any]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        accepted = "text, a list of token ids, or a list or generator of those"
        raise ValueError(f"prompts must be {accepted}, not {_kind(prompts)}")
    many = list(prompts)
    return [many] if many and isinstance(many[0], int) else many


def _check_params(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        hint = "; write SamplingParams(**params)" if isinstance(params, Mapping) else ""
        raise ValueError(
            f"params must be SamplingParams, or a list with one for each prompt, not {_kind(params)}{hint}"
        )
    return params


def _check_options(priority: int = 0, cache_salt: str = "") -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority must be an integer, not {_kind(priority)}")
    if not isinstance(cache_salt, str):
        raise ValueError(f"cache_salt must be text, not {_kind(cache_salt)}")


def _kind(value: Any) -> str:
    """For messages: what was given, without all that is in it."""
    return "None" if value is None else f"{value!r}" if isinstance(value, int | float) else type(value).__name__
