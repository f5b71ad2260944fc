"""What all routes share: the model's files, the engine's client, admission, work in threads, and the server's phase.

    loading → ready → draining
                   ↘ dead

Knows no dialect: token ids go in, Deltas come out. Of HTTP it knows the status of an error.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

from anabranch.config import EngineConfig
from anabranch.engine import plan
from anabranch.engine.client import EngineBusy, EngineDead
from anabranch.models.config import ModelConfig
from anabranch.request import Request, Update
from anabranch.server import errors
from anabranch.server.errors import CONTEXT_WORDS, ApiError, bad_request, context_length, unavailable
from anabranch.server.history import History
from anabranch.server.parsers.choose import Parsers
from anabranch.server.settings import Settings
from anabranch.server.threads import Threads, release_memory, tasks
from anabranch.text.chat_template import ChatTemplate
from anabranch.text.output import Answer, Delta
from anabranch.text.render_chat import Rendered
from anabranch.text.tokenizer import Spellings, Tokenizer

Result = TypeVar("Result")
Phase = Literal["loading", "ready", "draining", "dead"]
Updates = AsyncGenerator[tuple[int, Update], None]

THREADS = 4  # that render and tokenise; the tokenizer mostly releases the interpreter's lock
SMALL = 65_536  # bytes of a body: decoding these takes a few ms at most
MAX_COUNTED = 500_000  # characters whose tokens are counted even if no context could hold them
LARGE = 200_000  # bytes: larger requests wait for a thread of their own, and do not delay smaller ones
BUSY = "all threads are busy with other large requests; try again later"


@dataclass(frozen=True)
class Model:
    """What the server reads from the model folder."""

    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    parsers: Parsers
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams for requests that leave them out."""

    @cached_property
    def chat_tokenizer(self) -> Tokenizer:
        """The same, but tags of calls and thoughts stay in the text even where special tokens are skipped, and some
        have marks."""
        tokenizer = copy(self.tokenizer)
        tokenizer.spellings = {skip: Spellings(tokenizer, skip) for skip in (False, True)}
        tokenizer.spellings[True].skipped -= self.parsers.kept_tokens
        for spellings in tokenizer.spellings.values():
            spellings.update(self.parsers.marked_tokens)
        return tokenizer

    @cached_property
    def longest_token(self) -> int:
        """An upper bound of its characters of text."""
        return max(map(len, self.tokenizer.backend.get_vocab(with_added_tokens=True)), default=1)


class Client(Protocol):
    """What the server needs of an engine. EngineClient is one engine, replicas.client.ReplicaClient several; members
    are described there."""

    ready_stats: dict[str, Any]

    @property
    def num_engines(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def dead_reason(self) -> str | None: ...
    @property
    def hanging_for(self) -> float: ...
    def generate(self, request: Request) -> AsyncGenerator[Update, None]: ...
    async def stats(self, timeout: float = ..., rebalance: bool = ...) -> dict[str, Any]: ...
    async def wait(self) -> str: ...
    async def close(self, drain: bool = ..., timeout: float = ..., patience: float = ...) -> None: ...


class Service:
    def __init__(self, settings: Settings, engine: EngineConfig, names: tuple[str, ...]) -> None:
        self.settings, self.engine, self.names = settings, engine, names
        self.phase: Phase = "loading"
        self.reason = "the model is loading"
        """Why the server is not ready."""
        self.started = time.time()
        self.num_admitted = 0
        """Sequences that are being prepared, waiting or running."""
        self.history = History()
        self.threads = Threads(THREADS, "prepare")
        self.large_threads = Threads(1, "prepare-large")
        self._working: set[asyncio.Future[Any]] = set()
        self._cancelled = False
        self._model: Model | None = None
        self._client: Client | None = None

    def become_ready(self, model: Model, client: Client) -> None:
        self._model, self._client = model, client
        if self.phase == "loading":
            self.phase, self.reason = "ready", ""

    def leave(self, phase: Literal["draining", "dead"], reason: str) -> None:
        self.phase, self.reason = phase, reason

    def cancel_work(self) -> None:
        """Answer requests that wait for a thread with 503. The thread itself cannot be stopped."""
        self._cancelled = True
        for future in list(self._working):
            future.cancel()

    @property
    def num_busy_threads(self) -> int:
        """At the end of the process, those that do not finish."""
        return len(self.threads.running) + len(self.large_threads.running)

    def _not_ready(self) -> ApiError:
        return unavailable(f"not ready: {self.reason}", f"server_{self.phase}")

    def check_ready(self) -> None:
        if self.phase != "ready":
            raise self._not_ready()
        if not self.client.alive:  # before the watchdog has noticed
            raise unavailable(f"not ready: {self.client.dead_reason}", "server_dead")

    @property
    def model(self) -> Model:
        if self._model is None:
            raise self._not_ready()
        return self._model

    @property
    def client(self) -> Client:
        if self._client is None:
            raise self._not_ready()
        return self._client

    @property
    def max_model_len(self) -> int:
        return int(self.client.ready_stats["max_model_len"])

    @property
    def quantization(self) -> str:
        """What the weights are kept in; "" while the model is loading."""
        model = self._model
        return "" if model is None else plan.quantized(model.config, self.engine.quantization).quantization

    @property
    def max_body_bytes(self) -> int:
        return self.settings.body_limit(0 if self._client is None else self.max_model_len)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names and name.removesuffix(":latest") not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"no model {name!r} here; known: {known}", code="model_not_found", param="model")

    @contextlib.contextmanager
    def admitted(self, num_sequences: int, param: str = "n") -> Iterator[None]:
        """Hold places in the queue; 429 if they are taken. `param` is the field that gives their number."""
        num_sequences = max(1, num_sequences)  # a number below 1 is refused later, with the field's name
        num_engines = 1 if self._client is None else max(1, self._client.num_engines)
        places = num_engines * self.engine.max_num_seqs + self.settings.max_queue
        if num_sequences > places:
            what = "prompts × n is" if param == "n" else f"{param}: the number of prompts is"
            raise bad_request(f"{what} {num_sequences}; this server takes {places} sequences at once", param)
        if self.num_admitted + num_sequences > places:
            self.history.num_refused += 1
            message = f"the queue is full: {self.num_admitted} of {places} places are taken; try again later"
            raise errors.queue_full(message)
        self.num_admitted += num_sequences
        try:
            yield
        finally:
            self.num_admitted -= num_sequences

    async def run(self, work: Callable[[], Result], num_bytes: int) -> Result:
        """Do work that takes time in proportion to a request's size: at once if that is small, else in a thread."""
        return work() if num_bytes <= SMALL else await self.prepare(work, None, num_bytes)

    async def prepare(self, work: Callable[[], Result], param: str | None, num_bytes: int) -> Result:
        """Read, render and tokenise, in a thread and within a deadline. ValueError means that the request is wrong."""
        timeout, started, is_large = self.settings.prepare_timeout, threading.Event(), num_bytes > LARGE

        def job() -> Result:
            started.set()
            try:
                return work()
            finally:
                if is_large:
                    release_memory()

        threads = self.large_threads if is_large else self.threads
        future = asyncio.get_running_loop().run_in_executor(threads, job)
        self._working.add(future)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            if not started.is_set():
                raise unavailable(BUSY, "busy") from None
            raise bad_request(f"the prompt could not be prepared within {timeout:g} s; shorten it", param) from None
        except ValueError as error:
            raise bad_request(str(error), param) from None
        except asyncio.CancelledError:
            if self._cancelled:
                raise unavailable("the server is shutting down", "server_draining") from None
            raise
        finally:
            self._working.discard(future)

    def encode(
        self, prompt: Rendered, add_special_tokens: bool, param: str, counting: bool = False, generates: bool = True
    ) -> list[int]:
        """For `prepare`; `param` is the field that errors name. Text that cannot fit, however it is tokenised, is
        refused without tokenising it. `counting`: up to MAX_COUNTED characters may be longer than the context.
        `generates`: tokens are to follow the prompt's."""
        limit, text = self.max_model_len, prompt.text
        if len(text) > max(limit * self.model.longest_token, MAX_COUNTED if counting else 0):
            raise context_length(
                f"{CONTEXT_WORDS} {limit} tokens. However, the prompt has {len(text)} characters, which are more "
                "tokens than that in any case. Shorten the prompt.",
                param,
            )
        ids = self.model.tokenizer.encode(text, add_special_tokens, prompt.plain)
        if not counting:
            self.check_length(len(ids), param, generates)
        return ids

    def check_length(self, num_tokens: int, param: str, generates: bool = True) -> None:
        limit = self.max_model_len
        if num_tokens > limit - generates:
            position = self.model.config.max_position
            pool = "" if limit == position else f" (the model's own limit is {position}; the KV pool holds {limit})"
            raise context_length(
                f"{CONTEXT_WORDS} {limit} tokens{pool}. However, the prompt has {num_tokens} tokens"
                f"{' and at least one is to be generated' if generates else ''}. Shorten the prompt.",
                param,
            )

    def check_tokens(self, prompt_ids: list[int], param: str) -> None:
        if not prompt_ids:
            raise bad_request("the prompt is empty: give at least one token", param)
        vocabulary = self.model.config.vocab_size
        if (largest := max(prompt_ids)) >= vocabulary:
            raise bad_request(f"{param}: token id {largest} is not in the vocabulary [0, {vocabulary})", param)

    async def generate(self, answers: list[Answer]) -> AsyncGenerator[tuple[int, Delta], None]:
        """Pairs of an answer's index and a delta until all have finished. When it is closed early, the sequences that
        still run are aborted."""
        began = time.monotonic()
        if len(answers) == 1 and len(answers[0].requests) == 1:
            updates = self._updates(0, answers[0], answers[0].requests[0])
        else:
            updates = self._merged(answers)
        async with aclosing(updates):
            async for number, update in updates:
                answer = answers[number]
                delta = answer.add(update)
                if answer.errors:
                    raise errors.from_engine(answer.errors[0])
                if update.finish_reason == "abort":
                    raise unavailable("the server is shutting down; the answer is not complete", "server_draining")
                if len(delta.completion.token_ids) == len(delta.token_ids) > 0:
                    self.history.first_token(time.monotonic() - began)
                yield number, delta

    async def _updates(self, number: int, answer: Answer, request: Request) -> Updates:
        """One sequence's updates with the answer's index. Ending early, as after a stop string, aborts the sequence."""
        try:
            async with aclosing(self.client.generate(request)) as updates:
                async for update in updates:
                    yield number, update
                    if answer.to_abort(update):
                        return
        except EngineDead as error:
            raise unavailable(f"the engine has ended: {error.reason}", "server_dead") from None
        except EngineBusy as error:
            raise errors.queue_full(str(error)) from None
        except ValueError as error:
            raise bad_request(str(error)) from None

    async def _merged(self, answers: list[Answer]) -> Updates:
        """Updates of many sequences. A task for each reads one update at a time: while the consumer is slow, the client
        merges what arrives."""
        queue: asyncio.Queue[tuple[int, Update | ApiError | None, asyncio.Event]] = asyncio.Queue()

        async def read(number: int, request: Request) -> None:
            applied = asyncio.Event()
            try:
                async with aclosing(self._updates(number, answers[number], request)) as updates:
                    async for _, update in updates:
                        queue.put_nowait((number, update, applied))
                        await applied.wait()
                        applied.clear()
                queue.put_nowait((number, None, applied))
            except ApiError as error:
                queue.put_nowait((number, error, applied))

        readers = [read(number, request) for number, answer in enumerate(answers) for request in answer.requests]
        left = len(readers)
        async with tasks(*readers):
            while left:
                number, update, applied = await queue.get()
                if update is None:
                    left -= 1
                elif isinstance(update, ApiError):
                    raise update
                else:
                    yield number, update
                    applied.set()
