"""The engine: requests in, updates out, one step at a time. Knows tokens, not text and not HTTP.

    schedule → launch → read the step launched before

The order of the lines in `step` is the order of time: a step is launched before the last one's tokens are read, so the
device never waits for the host.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pkgutil import resolve_name
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from anabranch import platforms
from anabranch.config import EngineConfig
from anabranch.engine.drafts import NgramDrafter, StepDrafter
from anabranch.engine.kv_cache import KVCache
from anabranch.engine.metrics import Metrics
from anabranch.engine.runner import DATA_PARALLEL, Launched, Progress, Runner, load_runner
from anabranch.engine.sampler import can_take_back, needs_host_tokens
from anabranch.engine.scheduler import Scheduler, Sequence, Share
from anabranch.loader.checkpoint import with_stored_dtype
from anabranch.loader.locate import locate
from anabranch.loader.resolve import resolve
from anabranch.models.config import ModelConfig, read_config
from anabranch.models.generation import read_sampling_defaults
from anabranch.ops.sample import NOT_FINITE
from anabranch.request import INTERNAL, Request, TokenLogprobs, Update
from anabranch.sampling_params import Grammar
from anabranch.stages import stage

if TYPE_CHECKING:
    from anabranch.text.grammar import GrammarCompiler, Matcher
    from anabranch.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NOT_FINITE_TEXT = (
    f"{INTERNAL}the model's logits are NaN or infinite; damaged weights or an overflow in float16 can be the cause "
    "(try dtype bfloat16 or float32)"
)
ONE_MORE = " and at least one is to be generated"
CONSTRAINTS = ("bad_words", "allowed_token_ids", "min_tokens", "grammar")
"""The parameters that forbid tokens."""
LOG_SECONDS = 10.0
"""Between two log lines about logits that are not finite."""
NUM_COMPILERS = 8
"""Grammars that are compiled at the same time."""
COMPILING_SECONDS = 0.01
"""How long a step without other work waits for a grammar."""


class Engine:
    def __init__(
        self, config: EngineConfig, runner: Runner, model: ModelConfig, tokenizer: Tokenizer | None = None
    ) -> None:
        """The runner has its model loaded; its pages are allocated here."""
        num_pages = runner.num_pages()
        self.kv = KVCache(
            model.cache_groups,
            num_pages,
            config.page_size,
            prefix_cache=config.prefix_cache,
            max_chunk=config.page_size,  # where groups that slide are short of pages, chunks shrink to this
            state_interval=config.state_interval,
            num_ahead=config.num_ahead,
            cuts=all(getattr(layer.mixer, "keeps_cuts", layer.mixer.cache.policy.per_token) for layer in model.layers),
        )
        self.kv.longest = longest = self._longest(config.max_model_len)
        if longest < config.max_model_len:
            log.info("max_model_len: %d → %d, which is what the KV pool holds", config.max_model_len, longest)
        self.config = replace(config, max_model_len=longest, num_pages=max(num_pages))
        runner.allocate(num_pages, longest)
        self.model = model
        self.runner = runner
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=longest,
            max_drafts=config.max_drafts,
            max_samples=config.max_samples,
        )
        self.drafting = config.speculative != "none"
        """Whether requests get drafts."""
        self.metrics = Metrics()
        self.sequences: dict[str, Sequence] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.routed: dict[str, list[list[list[int]]]] = {}
        self.pooled: dict[str, torch.Tensor] = {}
        """By request: the sum of rows that go into its embedding."""
        self.in_flight: Launched | None = None
        self.compiling: list[tuple[Future[Matcher], Sequence]] = []
        self.compiler: GrammarCompiler | None = None
        self.compiler_lock = Lock()
        self.closed = False
        self.compiler_threads = ThreadPoolExecutor(NUM_COMPILERS, "grammar")
        self.num_arrived = 0
        self.eos_ids = frozenset(model.eos_ids)
        self.logged_not_finite = -math.inf

    def _longest(self, wanted: int) -> int:
        """The longest request the pool can hold alone, up to `wanted` tokens."""
        longest = bisect_left(range(1, wanted + 1), True, key=lambda length: not self.kv.fits(length))
        if longest < 2:
            raise ValueError("the KV pool does not hold a single request; give it more memory or pages")
        return longest

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; ValueError if it can never be served."""
        if self.closed:
            raise ValueError("the engine is closed")
        self._check(request)
        params = request.params
        bad_word_ids = self._bad_words(request)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        sequence = Sequence(request, self.num_arrived, needs_host_tokens(params, bad_word_ids), stop_ids, bad_word_ids)
        if self.drafting and can_take_back(params, bad_word_ids):
            sequence.drafter = StepDrafter() if self.config.speculative == "mtp" else NgramDrafter()
        if request.params.grammar is not None:
            self.compiling.append((self._matcher(request.params.grammar), sequence))
        else:
            self.scheduler.add(sequence)
        self.num_arrived += 1
        self.sequences[request.id] = sequence
        self.metrics.arrive(request.id, request.arrival)

    def _check(self, request: Request) -> None:
        if request.id in self.sequences:
            raise ValueError(f"request id {request.id!r} is in use")
        if not request.prompt_ids:
            raise ValueError("the prompt is empty: give at least one token")
        vocabulary = self.model.vocab_size
        params = request.params
        for name, tokens in (
            ("prompt", request.prompt_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token in (min(tokens), max(tokens)) if tokens else ():
                if not 0 <= token < vocabulary:
                    raise ValueError(f"{name}: token id {token} is not in the vocabulary [0, {vocabulary})")
        if request.pooling and not self.runner.embeds:
            raise ValueError(f"pooling: embeddings are not computed on the platform {self.runner.platform.name}")
        limit = self.config.max_model_len
        if len(request.prompt_ids) >= limit + bool(request.pooling):
            pool = "" if limit == self.model.max_position else f" (the KV pool has {self._pool()})"
            raise ValueError(
                f"This model's maximum context length is {limit} tokens{pool}. However, the prompt has "
                f"{len(request.prompt_ids)} tokens{'' if request.pooling else ONE_MORE}. Shorten the prompt."
            )
        for name in ("grammar", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(f"{name}: the model folder has no tokenizer.json, and this needs one")

    def _bad_words(self, request: Request) -> list[list[int]]:
        """Each word as it is and after a space, which most vocabularies spell differently."""
        if self.tokenizer is None:
            return []
        spelled = {prefix + word for word in request.params.bad_words for prefix in ("", " ")}
        return [self.tokenizer.encode(word, add_special_tokens=False) for word in sorted(spelled)]

    def _pool(self) -> str:
        pages = " + ".join(str(pool.num_pages) for pool in self.kv.pools)
        return f"{pages} pages of {self.config.page_size} tokens"

    def _matcher(self, grammar: Grammar) -> Future[Matcher]:
        """To be copied: requests with the same grammar share its compilation."""
        for future, sequence in self.compiling:
            if sequence.request.params.grammar == grammar:
                return future
        return self.compiler_threads.submit(self._compile, grammar)

    def _compile(self, grammar: Grammar) -> Matcher:
        from anabranch.text.grammar import GrammarCompiler

        assert self.tokenizer is not None
        with self.compiler_lock:
            if self.closed:
                raise ValueError("the engine is being closed")
            if self.compiler is None:
                self.compiler = GrammarCompiler(self.tokenizer.backend, self.model.vocab_size, self.model.eos_ids)
        return self.compiler.compile(grammar)

    def abort(self, id: str) -> None:
        """Forget a request, wherever it is; unknown ids are ignored."""
        sequence = self.sequences.pop(id, None)
        if sequence is None:
            return
        waiting = [item for item in self.compiling if item[1] is not sequence]
        if len(waiting) < len(self.compiling):
            self.compiling = waiting
        else:
            self.scheduler.finish(sequence, "abort")
        self._forget(sequence, "abort")

    def _forget(self, sequence: Sequence, reason: str) -> None:
        self.sequences.pop(sequence.id, None)
        self.prompt_logprobs.pop(sequence.id, None)
        self.routed.pop(sequence.id, None)
        self.pooled.pop(sequence.id, None)
        self.metrics.finish(sequence.id, reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.in_flight is not None or bool(self.compiling)

    def set_drafting(self, drafting: bool) -> None:
        """Whether new requests get drafts, in an engine with speculation and without requests."""
        assert not self.sequences and self.config.speculative != "none"
        if self.in_flight is not None:  # launched before the last request had ended
            self._read(self.in_flight)
            self.in_flight = None
        self.drafting = drafting

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        if self.closed:
            raise ValueError("the engine is closed")
        updates = self._take_compiled() if self.compiling else []
        shares = self.scheduler.schedule()
        launched = self._launch(shares) if shares else None
        if launched is None and self.config.data_parallel_size > 1:
            self.runner.join()
        if self.config.async_scheduling and not self.drafting:  # drafts continue tokens that are known
            launched, self.in_flight = self.in_flight, launched
        return updates + self._read(launched) if launched else updates

    @property
    def failure(self) -> str:
        """See Runner.failure."""
        return self.runner.failure

    def idle(self, waiting: bool = False) -> None:
        """There was no work for a while: see Runner.idle."""
        if self.runner.failure:
            raise RuntimeError(self.runner.failure)
        self.runner.idle(waiting)

    def rebalance(self) -> None:
        """Between two steps: see Runner.rebalance. ValueError where experts cannot move."""
        config = self.config
        if not (config.expert_copies or config.rebalance_interval) or not config.expert_load_interval:
            raise ValueError(
                "experts do not move here: start with expert_parallel, several ranks, expert_copies or "
                "rebalance_interval, and an expert_load_interval"
            )
        self.runner.rebalance()

    def _take_compiled(self) -> list[Update]:
        """Queue requests whose grammar is compiled; one whose grammar does not compile ends with an error."""
        failed: list[Update] = []
        waiting = []
        if not self.scheduler.has_work and self.in_flight is None and self.config.data_parallel_size == 1:
            wait([future for future, _ in self.compiling], COMPILING_SECONDS, FIRST_COMPLETED)
        for future, sequence in self.compiling:
            if not future.done():
                waiting.append((future, sequence))
            elif (error := future.exception()) is not None:
                text = str(error) if isinstance(error, ValueError) else f"grammar: {type(error).__name__}: {error}"
                failed.append(Update(id=sequence.id, finish_reason="error", error=text))
                self._forget(sequence, "error")
            else:
                sequence.matcher = future.result().copy()
                self.scheduler.add(sequence)
        self.compiling = waiting
        return failed

    def _launch(self, shares: list[Share]) -> Launched:
        for sequence in self.scheduler.admitted:
            self.metrics.admit(sequence.id, sequence.num_prompt)
        self.metrics.steps += 1
        if self.kv.copies:
            self.runner.copy_states(self.kv.copies)
            self.kv.copies.clear()
        return self.runner.launch(shares, self.kv.pages)

    def _read(self, launched: Launched) -> list[Update]:
        """Wait for a step and make updates of its tokens."""
        tokens, sampling = launched.wait(), launched.sampling
        rows: Iterable[int] = range(len(tokens))
        if self.drafting:
            rows = self._verify(launched, tokens)
            if launched.drafts is not None:
                self._keep_drafts(launched, rows)
            tokens, sampling = [tokens[row] for row in rows], [sampling[row] for row in rows]
        updates = self._end_without_token(sampling, tokens) if tokens and min(tokens) < 0 else []
        self._keep_routed(launched)
        self._keep_prompt_logprobs(launched)
        self._keep_pooled(launched)
        running = [share[0].id for share in sampling if share[0].finish_reason is None]
        if self.pooled:  # an embedding's token is none: it only shows that the rows are finite
            running = [id for id in running if id not in self.pooled]
        self.metrics.tokens(running, time.monotonic())
        for row, share, token in zip(rows, sampling, tokens, strict=True):
            sequence = share[0]
            known = sequence.tokens
            # The lines below, in short, for most sequences in most steps.
            if sequence.plain and token not in sequence.stop_ids and len(known) + 1 < sequence.limit:
                if sequence.finish_reason is None:
                    known.append(token)
                    updates.append(Update(sequence.id, [token], [], None, sequence.num_cached))
                continue
            if not self.scheduler.read(sequence, token):
                continue
            ended = None
            if sequence.waits_for_host and sequence.finish_reason is None:
                ended = self.runner.accept(sequence, token)
                if ended is not None:
                    self.scheduler.finish(sequence, "stop" if ended == "stop" else "error")
            updates.append(self._update(launched, row, sequence, token))
            if ended is not None and sequence.finish_reason == "error":
                updates[-1].error = ended
        return updates

    def _verify(self, launched: Launched, tokens: list[int]) -> list[int]:
        """The rows whose tokens count."""
        rows: list[int] = []
        counts: list[int] = []
        rejected: dict[Sequence, int] = {}
        begin = num_drafted = 0
        for share in launched.shares:
            end = begin + share.num_samples
            count = share.num_samples
            if count > 1:
                num_drafted += 1
                count = self.scheduler.verify(share, tokens[begin:end])
                self.metrics.drafts += 1
                self.metrics.draft_tokens += share.num_samples - 1
                self.metrics.accepted_tokens += count - 1
                if count < share.num_samples:
                    rejected[share.sequence] = share.num_samples - count
            rows += range(begin, begin + count)
            counts.append(count)
            begin = end
        if num_drafted:
            self.runner.settle(launched.shares, counts)
        if rejected:
            self.runner.take_back(rejected)
        return rows

    def _keep_drafts(self, launched: Launched, rows: list[int]) -> None:
        """Those after the last of a sequence's rows that count are for its next step."""
        assert launched.drafts is not None
        drafts = launched.drafts.wait().tolist()
        for row in rows:
            drafter = launched.sampling[row].sequence.drafter
            if isinstance(drafter, StepDrafter):
                drafter.drafts = [some[row] for some in drafts]

    def _end_without_token(self, sampling: list[Share], tokens: list[int]) -> list[Update]:
        """Requests for which the step found no token (see ops.sample) end with an error."""
        updates = []
        for share, token in zip(sampling, tokens, strict=True):
            sequence = share.sequence
            if token >= 0 or sequence.finish_reason is not None:
                continue
            if token == NOT_FINITE:
                self.metrics.nonfinite_logits += 1
                self._log_not_finite(sequence.id)
            error = NOT_FINITE_TEXT if token == NOT_FINITE else self._contradiction(sequence)
            self.scheduler.finish(sequence, "error")
            self._forget(sequence, "error")
            updates.append(Update(sequence.id, num_cached=sequence.num_cached, finish_reason="error", error=error))
        return updates

    def _contradiction(self, sequence: Sequence) -> str:
        """Which of the request's constraints leave no token together."""
        matcher, params = sequence.matcher, sequence.request.params
        if matcher is not None and matcher.error:
            return f"grammar: {matcher.error}"
        first, *others = [name for name in CONSTRAINTS if getattr(params, name)] or ["logits"]
        against = f"contradicts {' and '.join(others)}, " if others else ""
        return f"{first}: {against}no token is allowed after {len(sequence.output)} generated tokens"

    def _log_not_finite(self, id: str) -> None:
        now = time.monotonic()
        if now - self.logged_not_finite >= LOG_SECONDS:
            number = self.metrics.nonfinite_logits
            log.error("request %s: logits are NaN or infinite; it ends with an error (%d so far)", id, number)
            self.logged_not_finite = now

    def _update(self, launched: Launched, row: int, sequence: Sequence, token: int) -> Update:
        params = sequence.request.params
        update = Update(id=sequence.id, token_ids=[token], num_cached=sequence.num_cached)
        if params.logprobs is not None:
            assert launched.sampled is not None
            update.logprobs = [launched.sampled.token_logprobs(row, params.logprobs)]
        if params.prompt_logprobs is not None and len(sequence.tokens) == sequence.num_prompt + 1:
            update.prompt_logprobs = self.prompt_logprobs.pop(sequence.id, [None])
        if sequence.request.pooling:
            update.token_ids, sequence.finish_reason = [], "stop"
            vector_D = torch.nn.functional.normalize(self.pooled.pop(sequence.id).float(), dim=0)
            update.embedding = array("f", vector_D.tolist()).tobytes()
        if sequence.finish_reason is not None:
            update.finish_reason, update.stop_token = sequence.finish_reason, sequence.stop_token
            if params.return_routed_experts:
                update.routed_experts = self.routed.pop(sequence.id, [])[: len(sequence.tokens) - 1]
            self._forget(sequence, sequence.finish_reason)
        return update

    def _keep_prompt_logprobs(self, launched: Launched) -> None:
        if not launched.prompt_logprobs:
            return
        for share in launched.shares:
            id, top_n = share.sequence.id, share.sequence.request.params.prompt_logprobs
            if top_n is None or self.sequences.get(id) is not share.sequence:  # an id may have been used again
                continue
            kept = self.prompt_logprobs.setdefault(id, [None])
            # By position: after a preemption they come a second time.
            kept[share.begin + 1 :] = [one for part in launched.prompt_logprobs.get(id, []) for one in part.all(top_n)]

    def _keep_pooled(self, launched: Launched) -> None:
        if launched.pooled is None:
            return
        shares = [share for share in launched.shares if share.num_pooled]
        for share, sum_D in zip(shares, launched.pooled.wait(), strict=True):
            id = share.sequence.id
            if self.sequences.get(id) is share.sequence:  # a mean begins again after a preemption
                self.pooled[id] = sum_D + self.pooled.get(id, 0.0) if share.begin else sum_D

    def _keep_routed(self, launched: Launched) -> None:
        if launched.routed is None:
            return
        routed_TLK = launched.routed.wait()
        row = 0
        for share in launched.shares:
            count = share.end - share.begin
            id, wanted = share.sequence.id, share.sequence.request.params.return_routed_experts
            if wanted and self.sequences.get(id) is share.sequence:
                kept = self.routed.setdefault(id, [])
                kept[share.begin :] = routed_TLK[row : row + count].tolist()
            row += count

    def stats(self) -> dict[str, Any]:
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting) + len(self.compiling),
            "kv_usage": self.kv.usage(),
            "prefix_queries": self.kv.num_queries,
            "prefix_hits": self.kv.num_hits,
            "preemptions": self.scheduler.num_preemptions,
            "max_model_len": self.config.max_model_len,
            "expert_load": self.runner.expert_load(settled=not self.has_work),
            "expert_ranks": self.runner.expert_ranks(),
            **self.metrics.as_dict(),
        }

    def close(self) -> None:
        for id in list(self.sequences):
            self.abort(id)
        self.compiler_threads.shutdown(wait=False, cancel_futures=True)
        with self.compiler_lock:  # a compiler that is being made is closed too
            self.closed = True
            if self.compiler is not None:
                self.compiler.close()
        self.runner.close()


def make_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """An engine that is ready for requests."""
    from anabranch.text.tokenizer import Tokenizer

    with stage("config"):
        folder = locate(config.model, weights=config.load_format != "dummy")
        platform = platforms.current()
        model = read_config(folder, quantized=platform.reads_quantized, **config.model_options)
        model = with_stored_dtype(model, folder, config.load_format)
        read_sampling_defaults(folder, config.generation_config)  # refused before weights are read
        config = resolve(replace(config, model=str(folder)), model, platform)
        model = model.divide(0, config.tensor_parallel_size, config.expert_parallel)
    runner = load_runner(config, platform, progress)
    try:
        tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").exists() else None
        make = resolve_name(f"{DATA_PARALLEL}:DataParallelEngine") if config.data_parallel_size > 1 else Engine
        with stage("allocate"):
            engine: Engine = make(config, runner, model, tokenizer)
        runner.warm_up()
    except BaseException:
        runner.close()
        raise
    return engine
