"""Which tokens of which sequences the next step computes.

There are no phases. Each sequence has tokens (known, or sampled on the device and not yet read) and a number of them
whose keys and values are computed; the scheduler hands out the difference, as far as the step's token budget and the
pages go. Prefill, chunked prefill, decode, prefix reuse and recompute after preemption are all that one rule. Drafts
(engine/drafts) are tokens besides: a step computes them after the sequence's last token, and `verify` says which count.
All plain ints; this file knows neither tensors nor text.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from anabranch.engine.drafts import Drafter
from anabranch.engine.kv_cache import KVCache
from anabranch.request import FinishReason, Request

if TYPE_CHECKING:
    from anabranch.text.grammar import Matcher


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine."""

    request: Request
    order: int
    """Of arrival; breaks ties between equal priorities."""
    waits_for_host: bool = False
    """Must not be scheduled while its last token is unread (a grammar has to see it first)."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it."""
    bad_word_ids: list[list[int]] = field(default_factory=list)
    matcher: Matcher | None = None
    """Of its grammar, once that is compiled. For the sampler, as the bad words."""
    drafter: Drafter | None = None
    """Guesses its next tokens. Such a sequence is not scheduled either while a token is unread."""

    id: str = field(init=False)
    plain: bool = field(init=False)
    """It wants its tokens and nothing else, and the host need not read one before the next is sampled."""
    tokens: list[int] = field(init=False)
    """Prompt and answer, as far as the host knows them."""
    num_prompt: int = field(init=False)
    num_tokens: int = field(init=False)
    """Counts those too that launched steps sample and the host has not read yet."""
    limit: int = field(init=False)
    """The length at which it ends."""
    drafts: list[int] = field(default_factory=list)
    """Guesses of the tokens after `tokens`, which the launched step verifies."""
    cut: tuple[int, ...] = ()
    """Where the launched step keeps its states on its way; see KVCache.cut."""
    num_computed: int = 0
    """Tokens whose keys and values are in pages once all launched steps have run."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when first admitted."""
    quiet_until: int = 0
    """While fewer tokens are computed, the next one changes nothing about its pages, needs nothing of the host, and is
    not the answer's last."""
    slot: int = -1
    """Its row in the device's state while running."""
    placed: bool = False
    """Whether the runner has put its sampling state there."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None

    def __post_init__(self) -> None:
        params = self.request.params
        self.id = self.request.id
        wants_more = params.logprobs is not None or params.prompt_logprobs is not None or params.return_routed_experts
        self.plain = not (wants_more or self.waits_for_host or self.request.pooling)
        self.tokens = list(self.request.prompt_ids)
        self.num_prompt = self.num_tokens = len(self.tokens)
        self.limit = self.num_prompt + params.max_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Lower runs earlier and is preempted later."""
        return self.request.priority, self.order

    @property
    def num_pending(self) -> int:
        """Sampled by launched steps, not read yet; they follow `tokens`."""
        return self.num_tokens - len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Share(NamedTuple):
    """A sequence's part of one step: tokens [begin, end)."""

    sequence: Sequence
    begin: int
    end: int
    num_samples: int
    """How many of its last rows sample a token each: 1 where it ends with the sequence's last token, one more for each
    draft that follows it, else 0."""

    @property
    def prompt_targets(self) -> list[int]:
        """The prompt tokens that its rows predict, if the request wants their log probabilities: those after its first,
        and the one that follows it."""
        sequence = self.sequence
        if sequence.request.params.prompt_logprobs is None:
            return []
        return sequence.tokens[self.begin + 1 : min(self.end + 1, sequence.num_prompt)]

    @property
    def num_pooled(self) -> int:
        """How many of its last rows go into the request's embedding."""
        pooling = self.sequence.request.pooling
        return 0 if pooling is None else self.num_samples if pooling == "last" else self.end - self.begin


class Scheduler:
    def __init__(
        self,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_drafts: int = 0,
        max_samples: int = 0,
    ) -> None:
        """`max_drafts`: of one sequence in a step. `max_samples`: rows of a step that sample, drafts included; not less
        than `max_num_seqs` where there are drafts."""
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_drafts = max_drafts
        self.max_samples = max_samples
        self.waiting: list[Sequence] = []
        """Sorted by rank."""
        self.running: dict[Sequence, None] = {}
        """In order of admission."""
        self.free_slots = list(reversed(range(max_num_seqs)))
        self.num_preemptions = 0
        self.admitted: list[Sequence] = []
        """By the last `schedule`."""
        self.cut: list[Sequence] = []
        """Those that the last `schedule` has cut."""

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        # What follows an embedding's prompt is never computed.
        sequence.limit = min(sequence.limit, self.max_model_len + bool(sequence.request.pooling))
        bisect.insort(self.waiting, sequence, key=lambda s: s.rank)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Leave, from wherever it is. Results of steps already launched for it are to be ignored."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.finish_reason != "error":  # its keys and values may not be what others should find
            # Full pages of known tokens may be shared from now on: steps that read them are launched later.
            self.kv.commit(sequence.id, sequence.tokens, min(sequence.num_computed, len(sequence.tokens)))
        del self.running[sequence]
        self.free_slots.append(sequence.slot)
        sequence.slot, sequence.placed, sequence.drafts = -1, False, []
        self.kv.release(sequence.id)

    def _preempt(self, sequence: Sequence) -> None:
        """Give its pages to others; it computes its tokens again later (or finds them in the prefix cache)."""
        self._leave(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Share]:
        """Hand out the step's tokens, and change the sequences as if the step had run. Shares of one token come first.

        Running sequences come first, those that miss a single token before those that miss many, so that a long prompt
        never delays the others' next tokens; then waiting ones by rank.
        """
        for sequence in self.cut:
            if sequence.slot >= 0:  # the step that keeps its states is launched: others may start from them
                self.kv.commit(sequence.id, sequence.tokens, min(sequence.num_computed, len(sequence.tokens)))
        budget = self.max_num_batched_tokens
        shares: list[Share] = []
        long: list[Sequence] = []
        drafting: list[tuple[Sequence, Drafter]] = []
        preempted = self.num_preemptions
        new, give = tuple.__new__, shares.append  # a quarter of a Share's own __new__
        for sequence in list(self.running):
            begin = sequence.num_computed
            end = begin + 1
            # The branch below, in short, for most sequences in most steps.
            if begin < sequence.quiet_until and end == sequence.num_tokens and budget:
                sequence.num_computed = end
                sequence.num_tokens = end + 1
                give(new(Share, (sequence, begin, end, 1)))
                budget -= 1
                continue
            missing = self._missing(sequence)
            if missing > 1:
                long.append(sequence)
            elif missing and sequence.drafter is not None:
                drafting.append((sequence, sequence.drafter))
            elif missing and budget:
                budget -= self._give(sequence, 1, shares)
        num_single = len(shares)
        if drafting:
            budget -= self._give_drafts(drafting, budget, shares)
        for sequence in long:
            if budget:
                budget -= self._give(sequence, min(self._missing(sequence), budget), shares)
        self.admitted = []
        if self.num_preemptions == preempted:
            shares += self._admit(budget)
        shares[num_single:] = sorted(shares[num_single:], key=lambda share: share.end - share.begin)
        self.cut = []
        if self.kv.shares_states:
            for sequence, begin, end, _ in shares[num_single:]:
                sequence.cut = self.kv.cut(sequence.id, begin, end)
                self.cut += [sequence] if sequence.cut else []
        return shares

    def _missing(self, sequence: Sequence) -> int:
        """Tokens to compute; the answer's last token never is, since nothing follows it."""
        wanted = sequence.num_tokens
        if wanted > len(sequence.tokens) and (sequence.waits_for_host or sequence.drafter is not None):
            return 0
        return (wanted if wanted < sequence.limit else sequence.limit - 1) - sequence.num_computed

    def _give(self, sequence: Sequence, count: int, shares: list[Share]) -> int:
        """A share of up to `count` tokens; for their pages the lowest rank without a share in this step is preempted.
        0 tokens: it was this sequence itself, or had been already."""
        if sequence.slot < 0:
            return 0
        begin = sequence.num_computed
        while not (given := self.kv.advance(sequence.id, sequence.tokens, begin, count)):
            taken = {share.sequence for share in shares}
            victim = max((s for s in self.running if s not in taken), key=lambda s: s.rank)
            self._preempt(victim)
            if victim is sequence:
                return 0
        shares.append(self._share(sequence, begin, given))
        return given

    def _give_drafts(self, drafting: list[tuple[Sequence, Drafter]], budget: int, shares: list[Share]) -> int:
        """Shares of one token and its drafts. Drafts take what is left: of the budget and of the rows that may sample
        when all others have theirs, and of pages without preempting. Returns the tokens given."""
        coming = len(self.running) + min(len(self.waiting), len(self.free_slots))
        room = min(budget - len(drafting), self.max_samples - coming)
        total = 0
        for sequence, drafter in drafting[:budget]:
            begin, tokens = sequence.num_computed, sequence.tokens
            most = min(room, self.max_drafts, sequence.limit - 1 - sequence.num_tokens)
            drafts = drafter.propose(tokens, most) if most > 0 and sequence.slot >= 0 else []
            given = self.kv.advance(sequence.id, tokens, begin, 1 + len(drafts)) if drafts else 0
            if given > 1:
                sequence.drafts = drafts[: given - 1]
                sequence.num_computed += 1
                sequence.num_tokens += 1
                shares.append(Share(sequence, begin, begin + given, given))
                room -= given - 1
            else:
                given = self._give(sequence, 1, shares)
            total += given
        return total

    def _admit(self, budget: int) -> Iterator[Share]:
        while budget and self.waiting and self.free_slots:
            sequence = self.waiting[0]
            if sequence.num_pending or not min(self.kv.num_free):  # preempted while its last token was unread
                return
            params = sequence.request.params
            reuse = params.prompt_logprobs is None and not params.return_routed_experts
            reuse = reuse and sequence.request.pooling != "mean"
            if reuse and self.kv.shares_states and self._has_sibling(sequence):
                return
            found = self.kv.begin(sequence.id, sequence.tokens, sequence.request.cache_salt, reuse)
            count = self.kv.largest_chunk(sequence.id, found, min(len(sequence.tokens) - found, budget))
            if not self.kv.grow(sequence.id, found + count):
                self.kv.release(sequence.id)
                return
            self.waiting.pop(0)
            self.running[sequence] = None
            self.admitted.append(sequence)
            sequence.slot = self.free_slots.pop()
            if not sequence.num_preemptions:
                sequence.num_cached = found
            budget -= count
            yield self._share(sequence, found, count)

    def _has_sibling(self, sequence: Sequence) -> bool:
        """Whether one with the same prompt computes it now: this one can soon start from its states."""
        prompt, salt = sequence.request.prompt_ids, sequence.request.cache_salt
        return any(
            s.request.prompt_ids == prompt and s.request.cache_salt == salt and self.kv.has_stops(s.id)
            for s in self.running
        )

    def _share(self, sequence: Sequence, begin: int, count: int) -> Share:
        """The share of `count` tokens, for which there are pages; the sequence is changed as if they were computed."""
        if not sequence.waits_for_host and sequence.drafter is None:
            sequence.quiet_until = min(self.kv.quiet_until(sequence.id), sequence.limit - 1)
        sequence.num_computed = end = begin + count
        num_samples = int(end == sequence.num_tokens)
        sequence.num_tokens += num_samples
        return Share(sequence, begin, end, num_samples)

    def verify(self, share: Share, tokens: list[int]) -> int:
        """How many of the tokens that its rows sampled count, to be read one by one: those up to the first that is not
        the draft of its place, or that ends the sequence. The others continue a sequence that is not this one."""
        sequence, accepted = share.sequence, 0
        for draft, token in zip(sequence.drafts, tokens):  # no drafts: it has left its slot
            if draft != token or self._stops(sequence, token, len(sequence.tokens) + accepted + 1):
                break
            accepted += 1
        sequence.drafts = []
        sequence.num_computed += accepted
        sequence.num_tokens += accepted
        return accepted + 1

    def read(self, sequence: Sequence, token: int) -> bool:
        """A token that a step sampled is known now; False: the sequence has ended and it does not count."""
        if sequence.finish_reason is not None:
            return False
        sequence.tokens.append(token)
        length = len(sequence.tokens)
        if self._stops(sequence, token, length):
            sequence.stop_token = token
            self.finish(sequence, "stop")
        elif length >= sequence.limit:
            self.finish(sequence, "length")
        return True

    def _stops(self, sequence: Sequence, token: int, length: int) -> bool:
        """Whether the token, with which the sequence has `length` tokens, ends it."""
        return token in sequence.stop_ids and length > sequence.num_prompt + sequence.request.params.min_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def check(self) -> None:
        self.kv.check()
        assert self.waiting == sorted(self.waiting, key=lambda s: s.rank)
        slots = [s.slot for s in self.running] + self.free_slots
        assert len(set(slots)) == len(slots) and -1 not in slots
        for sequence in self.running:
            assert sequence.finish_reason is None
            assert 0 <= sequence.num_computed <= sequence.num_tokens
            assert sequence.num_pending in (0, 1, 2)
            assert not sequence.drafts or (sequence.num_pending, sequence.num_computed) == (1, len(sequence.tokens))
            assert sequence.quiet_until <= min(self.kv.quiet_until(sequence.id), sequence.limit - 1)
        for sequence in self.waiting:
            assert sequence.finish_reason is None and sequence.slot == -1 and sequence.num_computed == 0
