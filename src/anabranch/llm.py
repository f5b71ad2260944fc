"""The offline front door.

llm = LLM("path/or/hub-id")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.text)
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from anabranch.config import EngineConfig
from anabranch.request import Completion, RequestOutput, TokenLogprobs
from anabranch.sampling_params import Grammar, SamplingParams

if TYPE_CHECKING:
    from anabranch.engine.chat_template import ChatTemplate
    from anabranch.engine.output import Answer, Delta

__all__ = ["LLM", "Completion", "Grammar", "RequestOutput", "SamplingParams", "TokenLogprobs"]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    def __init__(self, model: str, *, show_progress: bool | None = None, **options: Any) -> None:
        """`options` are EngineConfig's fields: dtype, max_model_len, max_num_seqs, ..."""
        known = [field.name for field in fields(EngineConfig)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
                raise ValueError(f"unknown option {name!r}{hint}")
        from anabranch.engine.engine import make_engine
        from anabranch.engine.progress import Bar

        self.show_progress = sys.stderr.isatty() if show_progress is None else show_progress
        config = EngineConfig(model=str(model), **options)
        self.engine = make_engine(config, Bar("loading weights") if self.show_progress else None)
        self.tokenizer = self.engine.tokenizer
        self._ids = itertools.count()
        self._streams: dict[str, asyncio.Queue[Any]] = {}
        self._pump: asyncio.Task[None] | None = None
        self._template: ChatTemplate | None = None

    # -- batches -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue prompts (text, or token ids), one answer each, in their order. Bad input raises ValueError before
        anything runs."""
        many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        chosen = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(chosen) != len(many):
            raise ValueError(f"{len(many)} prompts, but {len(chosen)} SamplingParams: give one, or one for each")
        answers: list[Answer] = []
        try:
            for prompt, one in zip(many, chosen, strict=True):
                answers.append(self._add(prompt, one, priority=priority, cache_salt=cache_salt))
        except BaseException:
            self._abort(answers)
            raise
        self._run(answers)
        failed = next((answer for answer in answers if answer.errors), None)
        if failed is not None:
            raise ValueError(f"prompt {answers.index(failed)}: {failed.errors[0]}")
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
        many: Sequence[Messages] = [messages] if messages and isinstance(messages[0], Mapping) else messages  # type: ignore
        prompts = [self.render(conversation, tools, **template_options) for conversation in many]
        return self.generate(prompts, params)

    def render(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **template_options: Any
    ) -> list[int]:
        """A conversation as the model's chat template writes it, in token ids, ready for the answer."""
        from anabranch.engine.chat_template import ChatTemplate

        if self.tokenizer is None:
            raise ValueError("the model folder has no tokenizer.json: a chat needs one")
        if self._template is None:
            self._template = ChatTemplate(self.engine.config.model)
        text = self._template.render(list(messages), tools=list(tools) if tools else None, **template_options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _add(self, prompt: Prompt, params: SamplingParams, **options: Any) -> Answer:
        from anabranch.engine.output import Answer

        text: str | None = None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the model folder has no tokenizer.json: give token ids instead of text")
            text, prompt = prompt, self.tokenizer.encode(prompt)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            raise ValueError("a prompt of token ids must hold integers only")
        answer = Answer(str(next(self._ids)), prompt, params, self.tokenizer, text, arrival=time.monotonic(), **options)
        try:
            for request in answer.requests:
                self.engine.add(request)
        except ValueError:
            self._abort([answer])
            raise
        return answer

    def _abort(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            for request in answer.requests:
                self.engine.abort(request.id)

    def _run(self, answers: Sequence[Answer]) -> None:
        from anabranch.engine.progress import Counter

        by_request = {request.id: answer for answer in answers for request in answer.requests}
        shown = Counter("prompts", len(answers)) if self.show_progress else None
        left = len(answers)
        try:
            while left:
                for update in self.engine.step():
                    answer = by_request.get(update.id)
                    if answer is None or answer.finished:
                        continue
                    answer.add(update)
                    if answer.to_abort(update):
                        self.engine.abort(update.id)
                    left -= answer.finished
                    if shown is not None:
                        shown(len(answers) - left, len(update.token_ids))
        except BaseException:  # Ctrl-C above all: nothing of this call may linger in the engine
            self._abort(answers)
            raise

    # -- streams -------------------------------------------------------------------------------------------------------

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """Deltas (index, text, token_ids, completion) as they come. Leaving early aborts the request. Several streams
        may run at once in one event loop; they share the engine's batches."""
        answer = self._add(prompt, params or SamplingParams(), **options)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        for request in answer.requests:
            self._streams[request.id] = queue
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._step_for_streams())
        try:
            while not answer.finished:
                update = await queue.get()
                if isinstance(update, BaseException):
                    raise update
                delta = answer.add(update)
                if answer.to_abort(update):
                    self.engine.abort(update.id)
                yield delta
                if answer.errors:
                    raise ValueError(answer.errors[0])
        finally:
            self._abort([answer])
            for request in answer.requests:
                self._streams.pop(request.id, None)

    async def _step_for_streams(self) -> None:
        try:
            while self._streams and self.engine.has_work:
                for update in await asyncio.to_thread(self.engine.step):
                    if update.id in self._streams:
                        self._streams[update.id].put_nowait(update)
        except Exception as error:  # the engine broke: whoever waits must hear of it
            for queue in self._streams.values():
                queue.put_nowait(error)

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
