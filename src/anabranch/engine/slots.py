"""Which sequence's sampling state each slot holds: bookkeeping that all runners share."""

from anabranch.engine.sampler import Sampler
from anabranch.engine.scheduler import Sequence


class Slots:
    def __init__(self, sampler: Sampler, eos_ids: tuple[int, ...]) -> None:
        self.sampler = sampler
        self.eos_ids = eos_ids
        self.routed: set[int] = set()
        """Slots of requests with `return_routed_experts`."""
        self.prompt_rows: set[int] = set()
        """Slots of requests that want something of their prompt's rows: with `prompt_logprobs` or `pooling`."""

    def place(self, sequence: Sequence) -> None:
        """Put the sequence's sampling state into its slot, in place of an earlier sequence's."""
        slot, params = sequence.slot, sequence.request.params
        if self.sampler.slots[slot] is not None:
            self.sampler.remove(slot)
        self.sampler.add(
            slot,
            sequence.request,
            sequence.output,
            sequence.matcher,
            eos_ids=self.eos_ids,
            bad_word_ids=sequence.bad_word_ids,
        )
        (self.routed.add if params.return_routed_experts else self.routed.discard)(slot)
        wanted = params.prompt_logprobs is not None or sequence.request.pooling
        (self.prompt_rows.add if wanted else self.prompt_rows.discard)(slot)
        sequence.placed = True

    def take_back(self, counts: dict[Sequence, int]) -> None:
        """See Runner.take_back."""
        slots = {sequence.slot: count for sequence, count in counts.items() if sequence.placed}
        if slots:
            self.sampler.take_back(list(slots), list(slots.values()))

    def accept(self, sequence: Sequence, token: int) -> str | None:
        """See Runner.accept. A sequence that was preempted meanwhile gets its tokens when it is placed again."""
        if not sequence.placed:
            return None
        allowed, matcher = self.sampler.accept(sequence.slot, token), sequence.matcher
        if matcher is None:
            return None
        if not allowed:
            return f"grammar: {matcher.error or f'token {token} is not allowed'}"
        return "stop" if matcher.is_finished else None
