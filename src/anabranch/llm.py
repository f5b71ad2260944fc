"""The Python interface for offline batches and streams.

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

from anabranch import bundled, embedding
from anabranch.config import EngineConfig
from anabranch.kernels.compiling import compile_server
from anabranch.known_flags import engine_options
from anabranch.models.generation import read_sampling_defaults
from anabranch.request import INTERNAL, Completion, RequestOutput, TokenLogprobs
from anabranch.sampling_params import Grammar, SamplingParams
from anabranch.stages import Stages, stage

if TYPE_CHECKING:
    from anabranch.engine.engine import Engine
    from anabranch.request import Pooling, Update
    from anabranch.text.chat_template import ChatTemplate
    from anabranch.text.output import Answer, Delta
    from anabranch.text.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Grammar", "RequestOutput", "SamplingParams", "TokenLogprobs"]

LONG_START = 10.0  # seconds
MANY_PROMPTS = 16
"""A call of `generate` with at least this many prompts may first spend a tenth of a second on a graph that earlier
steps could have used. An LLM has no idle time of its own for that; with fewer prompts the delay would be noticed."""

Prompt = str | Sequence[int] | Mapping[str, Any]
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
        """`model` is a folder or a hub id (default: the bundled model). `options` are fields of EngineConfig: dtype,
        max_model_len, max_num_seqs, ...

        `show_progress` (default: on a terminal) also shows what a start of more than ten seconds spent its time on;
        True shows it for every start. A program that exists for this LLM passes `Stages.of_process()` as `stages`, so
        that its imports count.
        """
        known = {field.name: field.default for field in fields(EngineConfig)}
        options = engine_options(options, known)
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
                raise ValueError(f"unknown option {name!r}{hint}")
        if model is not None and not isinstance(model, str | os.PathLike):
            raise ValueError(f"model must be a folder or a hub id owner/name, not {_shown(model)}")
        config = EngineConfig(model=bundled.folder() if model is None else os.fspath(model), **options)
        self.show_progress = sys.stderr.isatty() if show_progress is None else show_progress
        self.stages = stages or Stages()
        with self.stages.shared():
            self.engine = self._start(config)
        gc.freeze()  # these objects stay: do not search them for garbage in the middle of a step
        weakref.finalize(self, gc.unfreeze)
        self.stages.finish()
        assert self.stages.ready is not None
        if show_progress or (self.show_progress and self.stages.ready > LONG_START):
            print(self.stages.table(), file=sys.stderr, flush=True)
        self.tokenizer = self.engine.tokenizer
        self.sampling_defaults = read_sampling_defaults(self.engine.config.model, config.generation_config)
        """Fields of SamplingParams that the model's generation_config.json sets."""
        self._ids = itertools.count()
        self._streams: dict[str, asyncio.Queue[Any]] = {}
        self._stepper: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._between_steps = asyncio.Lock()
        """Of `_loop`. The steps of streams run in a thread; requests are added only between them."""
        self._stepping = threading.Lock()
        self._to_abort: list[str] = []
        """Ids of requests to abort when the running step has ended."""
        self._template: ChatTemplate | None = None

    def _start(self, config: EngineConfig) -> Engine:
        compile_server.start_early()  # before torch is imported: it imports torch in parallel
        with stage("import"):
            from anabranch.engine.engine import make_engine
            from anabranch.engine.progress import Bar
        try:
            return make_engine(config, Bar("loading weights") if self.show_progress else None)
        finally:
            with stage("compile"):
                compile_server.close()

    @property
    def default_params(self) -> SamplingParams:
        """SamplingParams with the temperature, top_k, top_p, min_p and repetition_penalty of the model's
        generation_config.json, unless the option `generation_config` is "none". To change a field, use
        `dataclasses.replace(llm.default_params, max_tokens=64)`."""
        return SamplingParams(**self.sampling_defaults)

    def _params(self, params: Any) -> SamplingParams:
        if params is None:
            return self.default_params
        if not isinstance(params, SamplingParams):
            hint = "; write SamplingParams(**params)" if isinstance(params, Mapping) else ""
            wanted = "SamplingParams, or a list with one for each prompt"
            raise ValueError(f"params must be {wanted}, not {_shown(params)}{hint}")
        return params

    # -- batches -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Iterator[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue prompts (text or token ids; one, a list or a generator of them) and return their answers in order.
        `params` are one for all or one for each (default: `default_params`). Bad input raises ValueError, and no
        request of the call stays in the engine. An answer that could not be completed because the model gave NaN has
        the finish_reason "error", and the log names it; the other answers are not affected.

        As in vLLM, a prompt may be {"prompt": text} or {"prompt_token_ids": ids}; `sampling_params` is `params`, and
        `use_tqdm` says whether to show progress (default: `show_progress`)."""
        params = _one_of(params, sampling_params)
        many = _several(prompts)
        if isinstance(params, list | tuple):
            chosen = [self._params(one) for one in params]
        else:
            chosen = [self._params(params)] * len(many)
        if len(chosen) != len(many):
            raise ValueError(f"{len(many)} prompts, but {len(chosen)} SamplingParams: give one, or one for each")
        return [answer.output for answer in self._answers(many, chosen, use_tqdm, priority, cache_salt)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt] | Iterator[Prompt],
        *,
        pooling: Pooling = "last",
        dimensions: int | None = None,
        use_tqdm: bool | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[list[float]]:
        """The embeddings of prompts, in order: the model's hidden state after the last norm, of the last token or the
        mean over all, as a vector of length 1. `dimensions` keeps the first so many numbers, and makes the length 1
        again."""
        embedding.check(pooling, dimensions, self.engine.model.hidden_size)
        many = _several(prompts)
        answers = self._answers(many, [embedding.PARAMS] * len(many), use_tqdm, priority, cache_salt, pooling)
        for number, answer in enumerate(answers):
            if answer.errors:
                raise RuntimeError(f"prompt {number}: {answer.errors[0]}")
        return [embedding.shorten(answer.output.embedding or b"", dimensions).tolist() for answer in answers]

    def _answers(
        self, many: list[Any], chosen: list[SamplingParams], use_tqdm: bool | None, *options: Any
    ) -> list[Answer]:
        """The finished answers to prompts with their parameters; for `options` see `_add`."""
        if self._stepper is not None and not self._stepper.done():
            raise RuntimeError("streams are running on this LLM: wait for them, or use a stream here too")
        if len(many) >= MANY_PROMPTS:
            self.engine.idle(waiting=True)
        answers: list[Answer] = []
        updates: list[Update] = []
        left = self.engine.config.max_num_batched_tokens
        try:
            for number, (prompt, one) in enumerate(zip(many, chosen, strict=True)):
                try:
                    answers.append(self._add(prompt, one, *options))
                except ValueError as error:
                    raise (ValueError(f"prompt {number}: {error}") if len(many) > 1 else error) from None
                was, left = left, left - len(answers[-1].requests[0].prompt_ids)
                if left <= 0 < was:  # the first step is full: it runs while the other prompts are added
                    updates += self.engine.step()
        except BaseException:
            self._abort(answers)
            raise
        self._run(answers, updates, self.show_progress if use_tqdm is None else use_tqdm)
        for number, answer in enumerate(answers):
            if refused := [error for error in answer.errors if not error.startswith(INTERNAL)]:
                raise ValueError(f"prompt {number}: {refused[0]}")
        return answers

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several. Variables of the template are given by name, or, as
        in vLLM, as `chat_template_kwargs`."""
        params = _one_of(params, sampling_params)
        template_options |= chat_template_kwargs or {}
        if not _is_list(messages):
            raise ValueError(f"messages must be a list of messages, or of such lists, not {_shown(messages)}")
        given: list[Any] = list(messages)
        if not given:
            raise ValueError("messages is empty: give at least one")
        many = [given] if isinstance(given[0], Mapping) else given
        prompts = [self.render(conversation, tools, **template_options) for conversation in many]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def render(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **template_options: Any
    ) -> list[int]:
        """The token ids of a conversation in the model's chat template, up to where the answer begins. Special tokens
        in the text of a message, such as <|im_end|>, are encoded as text."""
        from anabranch.text.chat_template import NO_TOOLS, ChatTemplate
        from anabranch.text.render_chat import render_chat

        if not _is_list(messages):
            raise ValueError(f"a conversation must be a list of messages, not {_shown(messages)}")
        if tools is not None and not _is_list(tools):
            raise ValueError(f"tools must be a list of tools, not {_shown(tools)}")
        if self.tokenizer is None:
            raise ValueError("the model folder has no tokenizer.json: a chat needs one")
        if self._template is None:
            self._template = ChatTemplate(self.engine.config.model)
        if tools and not self._template.writes_tools:
            raise ValueError(NO_TOOLS)
        given = list(tools) if tools else None
        rendered = render_chat(self._template, self.tokenizer, list(messages), given, **template_options)
        return self.tokenizer.encode(rendered.text, False, rendered.plain)

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
        pooling: Pooling | None = None,
    ) -> Answer:
        from anabranch.text.output import Answer

        self._abort_between_steps()
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, not {_shown(priority)}")
        if not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt must be text, not {_shown(cache_salt)}")
        if isinstance(prompt, Mapping) and _is_named(prompt):
            if other := set(prompt) - {"prompt", "prompt_token_ids"}:
                raise ValueError(f"a prompt has prompt or prompt_token_ids, and no {', '.join(map(repr, other))}")
            prompt = prompt["prompt_token_ids" if "prompt_token_ids" in prompt else "prompt"]
        text: str | None = None
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty: give at least one character")
            if self.tokenizer is None:
                raise ValueError("the model folder has no tokenizer.json: give token ids instead of text")
            text, ids = prompt, self.tokenizer.encode(prompt)
        elif _is_list(prompt) and not isinstance(prompt, Mapping):
            ids = list(prompt)
        else:
            raise ValueError(f"a prompt must be text or a list of token ids, not {_shown(prompt)}")
        types = set(map(type, ids))  # quicker than to check every token
        if bool in types or not all(issubclass(type_, int) for type_ in types):
            raise ValueError("a prompt of token ids must hold integers only")
        options: dict[str, Any] = {"arrival": time.monotonic(), "priority": priority, "cache_salt": cache_salt}
        options["pooling"] = pooling
        answer = Answer(str(next(self._ids)), ids, params, self.tokenizer, text, **options)
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

    def _run(self, answers: Sequence[Answer], updates: Sequence[Update], show_progress: bool) -> None:
        """Step until all answers are finished; `updates` are of steps before."""
        from anabranch.engine.progress import Counter

        by_request = {request.id: answer for answer in answers for request in answer.requests}
        shown = Counter("prompts", len(answers)) if show_progress else None
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
        except BaseException:  # Ctrl-C in particular: no request of this call may stay in the engine
            self._abort(answers)
            raise

    # -- streams -------------------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """An async iterator over the Deltas (index, text, token_ids, completion) of an answer. Ending it early aborts
        the request. Several streams may run at once in one event loop; they share the engine's batches."""
        return Stream(self, prompt, self._params(params), options)

    async def _open(
        self, prompt: Prompt, params: SamplingParams, options: dict[str, Any], queue: asyncio.Queue[Any]
    ) -> Answer:
        """Add the requests of a stream between two steps, and from then on put their updates into the queue."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._between_steps = loop, asyncio.Lock()
        async with self._between_steps:
            answer = self._add(prompt, params, **options)
        self._streams |= dict.fromkeys((request.id for request in answer.requests), queue)
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_for_streams())
        return answer

    async def _step_for_streams(self) -> None:
        try:
            while self._streams and self.engine.has_work:
                async with self._between_steps:
                    updates = await asyncio.to_thread(self._step)
                    self._abort_between_steps()
                for update in updates:
                    if update.id in self._streams:
                        self._streams[update.id].put_nowait(update)
        except Exception as error:  # the engine broke: every stream raises it
            for queue in self._streams.values():
                queue.put_nowait(error)

    def _step(self) -> list[Update]:
        with self._stepping:
            return self.engine.step()

    def _abort_between_steps(self, ids: Sequence[str] = ()) -> None:
        """Abort these requests and those noted before; while a step is running, only note them."""
        self._to_abort += ids
        if self._to_abort and self._stepping.acquire(blocking=False):
            try:
                while self._to_abort:
                    self.engine.abort(self._to_abort.pop())
            finally:
                self._stepping.release()

    def stats(self) -> dict[str, Any]:
        """The engine's statistics, and what the start spent its time on."""
        self._abort_between_steps()
        return {**self.engine.stats(), "startup": self.stages.as_dict()}

    def close(self) -> None:
        with self._stepping:  # a stream's step ends first
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """Iterates over the deltas of one answer. However it ends (also by `break`, `aclose` or an exception), what is left
    of its requests is aborted."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams, options: dict[str, Any]) -> None:
        self.llm = llm
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.arguments = prompt, params, options, self.queue
        self.answer: Answer | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self.answer is None:
            self.answer = await self.llm._open(*self.arguments)
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
            self.llm._abort_between_steps([update.id])
        return delta

    def close(self) -> None:
        if self.answer is not None:
            ids = [request.id for request in self.answer.requests if self.llm._streams.pop(request.id, None)]
            self.llm._abort_between_steps(ids)

    __del__ = close

    async def aclose(self) -> None:
        self.close()


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | Iterator) and not isinstance(value, str | bytes | bytearray)


def _is_named(prompt: Any) -> bool:
    """Whether it is a prompt as a mapping."""
    return isinstance(prompt, Mapping) and ("prompt" in prompt or "prompt_token_ids" in prompt)


def _one_of(params: Any, sampling_params: Any) -> Any:
    if params is not None and sampling_params is not None:
        raise ValueError("params and sampling_params are the same: give one of them")
    return params if sampling_params is None else sampling_params


def _several(prompts: Any) -> list[Any]:
    """A list of prompts, from one or several."""
    if isinstance(prompts, str) or _is_named(prompts):
        return [prompts]
    if not _is_list(prompts):
        accepted = "text, a list of token ids, or a list or generator of those"
        raise ValueError(f"prompts must be {accepted}, not {_shown(prompts)}")
    many = list(prompts)
    return [many] if many and isinstance(many[0], int) else many


def _shown(value: Any) -> str:
    """A value in an error message: a number itself, of anything else the type."""
    return "None" if value is None else f"{value!r}" if isinstance(value, int | float) else type(value).__name__
