"""Logits → tokens, batched on the device, each request with its own parameters.

What happens to a row of logits, in this order:

1. masks: allowed_token_ids, the grammar, bad_words, min_tokens (EOS and stop_token_ids, until there are as many);
   and logit_bias, which is added
2. repetition_penalty (tokens of prompt and output), then frequency_penalty and presence_penalty (of the output alone)
3. temperature, top_k, top_p, min_p and the draw (ops.sample); temperature 0 takes the best of 2

Log probabilities are the model's own: of the logits before all of this.

A running request has a slot. Its parameters are in device tensors by slot; what a batch needs of them is gathered when
the batch changes (SamplingPlan), so that a step over the same slots as the last uploads nothing; or, where there is
nothing to do but draws, by the device in every step.
Randomness is a function of (seed, number of tokens generated, token id): nothing else in the batch, no slot and no
preemption changes what a request draws from its logits. Nothing here waits for the device. Some requests can be sampled
only after the host has read their last token (`needs_host_tokens`, `accept`). A row of logits with NaN or +∞ in it, or
in which nothing is allowed, gives a negative number instead of a token (ops.sample).

R rows of a step, V vocabulary, S slots, N some of the rows, E edits of single logits, M words of a bit mask, P rows of
the penalty table, L rows with log probabilities.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import torch

from anabranch import ops
from anabranch.engine.sampling_plan import (
    FOREVER,
    RANDOM,
    SPECIAL,
    Draw,
    Edits,
    Logprobs,
    Occupant,
    Penalty,
    PenaltyTable,
    Sampled,
    SamplingMode,
    SamplingPlan,
    Trait,
    chunks,
    token_logprobs,
)
from anabranch.ops.mask_logits import pack_mask
from anabranch.ops.penalize import PenalizeCall
from anabranch.ops.sample import SampleCall, or_reason
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams
from anabranch.text.grammar import fill_masks

if TYPE_CHECKING:
    from anabranch.text.grammar import Matcher

FORBIDDEN = float("-inf")
MAX_PLANS = 8


def needs_host_tokens(params: SamplingParams, bad_word_ids: Sequence[Sequence[int]] = ()) -> bool:
    """Whether such a request can be sampled only after the host has read its last token."""
    return params.grammar is not None or any(len(word) > 1 for word in bad_word_ids)


def can_take_back(params: SamplingParams, bad_word_ids: Sequence[Sequence[int]] = ()) -> bool:
    """Whether tokens of such a request can be sampled on trial: a penalty would count them."""
    penalized = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
    return not penalized and not needs_host_tokens(params, bad_word_ids)


class Sampler:
    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, seed: int = 0, max_rows: int = 0
    ) -> None:
        """`max_rows`: of a captured step, if it has several of a request."""
        self.vocab_size = vocab_size
        self.device = device
        self.seed = seed
        self.slots: list[Occupant | None] = [None] * max_num_seqs
        self._slots_with: dict[Trait, set[int]] = {trait: set() for trait in get_args(Trait)}
        self._empty = set(range(max_num_seqs))
        self._joining: dict[int, Occupant] = {}
        """Those whose parameters are not on the device yet."""
        self._plans: dict[tuple[int, ...], SamplingPlan] = {}
        """By slots; several, because requests that need the host's tokens skip every other step."""
        # Parameters by slot; the last slot is for padding rows.
        self._float_6S = torch.zeros(6, max_num_seqs + 1, device=device)
        """temperature, top_p, min_p, presence, frequency, repetition"""
        self._int_3S = torch.zeros(3, max_num_seqs + 1, dtype=torch.int64, device=device)
        """top_k, seed, tokens generated"""
        self._position_S = self._int_3S[2]
        max_rows = max(max_rows, max_num_seqs)
        self._nothing_R = torch.zeros(max_rows, device=device), self._int_3S.new_zeros(max_rows)
        """Temperature 0; seed and position 0."""
        self._penalties = PenaltyTable(vocab_size, device)
        self._pinned = device.type != "cpu"
        self.by_slot = self._pinned
        """Whether draws look up their parameters in every step, greedy rows too, instead of in a plan. Kernels take all
        rows at once; on a CPU fewer rows are faster."""

    def add(
        self,
        slot: int,
        request: Request,
        output_ids: Sequence[int] = (),
        matcher: Matcher | None = None,
        *,
        eos_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """The request takes the slot, `output_ids` generated so far. The matcher accepts those it does not know."""
        assert self.slots[slot] is None, f"slot {slot} is taken"
        params = request.params
        edits = [(token, float(bias), FOREVER) for token, bias in params.logit_bias.items()]
        edits += [(word[0], FORBIDDEN, FOREVER) for word in bad_word_ids if len(word) == 1]
        if params.min_tokens:
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
            until = min(params.min_tokens, FOREVER - 1)
            edits += [(token, FORBIDDEN, until) for token in stops if token < self.vocab_size]
        bad_sequences = [tuple(word) for word in bad_word_ids if len(word) > 1]
        if matcher is not None:
            for token in output_ids[matcher.num_accepted :]:
                matcher.accept(token)
        history = list(output_ids) if bad_sequences else []
        occupant = Occupant(request, tuple(output_ids), matcher, edits, bad_sequences, history)
        self.slots[slot] = self._joining[slot] = occupant
        for trait in occupant.traits:
            self._slots_with[trait].add(slot)
        self._empty.remove(slot)
        self._plans.clear()

    def remove(self, slot: int) -> None:
        occupant = self._occupant(slot)
        if occupant.penalty_row is not None:
            self._penalties.free.append(occupant.penalty_row)
        for trait in occupant.traits:
            self._slots_with[trait].remove(slot)
        self._empty.add(slot)
        self.slots[slot] = None
        self._joining.pop(slot, None)
        self._plans.clear()

    def accept(self, slot: int, token: int) -> bool:
        """The host has read the slot's last token. False: the grammar does not allow it (see the matcher's `error`)."""
        occupant = self._occupant(slot)
        if not occupant.unread:
            return True
        occupant.unread = False
        if occupant.bad_sequences:
            occupant.history.append(token)
        return occupant.matcher is None or occupant.matcher.accept(token)

    @torch.inference_mode()
    def take_back(self, slots: list[int], counts: list[int]) -> None:
        """The last so many tokens of these slots do not count as generated."""
        if self.mode(slots) != "greedy":  # else nothing depends on how many there are
            slot_N, count_N = self._upload([slots, counts])
            self._position_S.index_add_(0, slot_N, -count_N)

    @torch.inference_mode()
    def sample(self, logits_RV: torch.Tensor, slots: list[int]) -> Sampled:
        """One token for each row, which counts as generated. A slot with several rows samples its next tokens there, in
        order; not one that needs the host's tokens. The logits are contiguous and in any float dtype; those in fp32 are
        written over."""
        assert logits_RV.shape == (len(slots), self.vocab_size), f"logits {logits_RV.shape} of {len(slots)} slots"
        assert self._empty.isdisjoint(slots), f"slot {self._empty.intersection(slots).pop()} is empty"
        mode = self.mode(slots)
        if mode == "greedy":
            return Sampled(_best(logits_RV))
        turns = None if len(set(slots)) == len(slots) else _turns(slots)
        if mode == "drawn" and (self.by_slot or turns is not None):
            turn_R = None if turns is None else self._upload(turns)
            return Sampled(self.sample_slots(logits_RV, self._upload(slots), mode, turn_R))
        if turns is not None:
            return self._sample_in_turns(logits_RV, turns, slots)
        plan = self._plan(slots)
        for occupant in plan.needing_host:
            assert not occupant.unread, f"request {occupant.request.id}: its last token has not been accepted yet"
            occupant.unread = True

        raw_LV = logits_RV if plan.logprobs_row_L is None else logits_RV[plan.logprobs_row_L]
        if plan.changes_logits:
            if logits_RV.dtype != torch.float32:
                logits_RV = logits_RV.float()  # what is added to them must not be rounded to less
            elif plan.logprobs_rows and plan.logprobs_row_L is None:
                raw_LV = logits_RV.clone()
            self._change_logits(plan, logits_RV)
        token_R = self._choose(plan, logits_RV)
        # Rows without a token count as token 0 here: their requests end with an error once the host has read it.
        if plan.penalty is not None:
            token_N = token_R[plan.penalty.row_N].clamp_(min=0)
            self._penalties.count(plan.penalty.table_row_N, token_N, plan.penalty.one_N)
        self._position_S.index_add_(0, plan.slot_R, plan.one_R)
        if not plan.logprobs_rows:
            return Sampled(token_R)
        token_L = token_R.clamp(min=0) if plan.logprobs_row_L is None else token_R[plan.logprobs_row_L].clamp_(min=0)
        found = token_logprobs(raw_LV, token_L, plan.top_n).to_host()
        return Sampled(token_R, {row: (found, place) for place, row in enumerate(plan.logprobs_rows)})

    def _sample_in_turns(self, logits_RV: torch.Tensor, turns: list[int], slots: list[int]) -> Sampled:
        """First rows of slots, then second ones and so on, so that penalties count the tokens before."""
        token_R = torch.empty(len(slots), dtype=torch.int64, device=self.device)
        logprobs: dict[int, tuple[Logprobs, int]] = {}
        for turn in range(max(turns) + 1):
            rows = [row for row, mine in enumerate(turns) if mine == turn]
            row_N = self._upload(rows)
            sampled = self.sample(logits_RV[row_N], [slots[row] for row in rows])
            token_R[row_N] = sampled.token_R
            logprobs |= {rows[row]: found for row, found in sampled.logprobs.items()}
        return Sampled(token_R, logprobs)

    def mode(self, slots: list[int]) -> SamplingMode:
        if self._joining:
            self._join()
        if self._some(SPECIAL, slots):
            return "any"
        return "drawn" if self._some(RANDOM, slots) else "greedy"

    def _some(self, traits: tuple[Trait, ...], slots: list[int]) -> bool:
        """Whether any of the slots has any of the traits."""
        return any((found := self._slots_with[trait]) and not found.isdisjoint(slots) for trait in traits)

    def sample_slots(
        self, logits_RV: torch.Tensor, slot_R: torch.Tensor, mode: SamplingMode, turn_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """token_R where only the device knows the rows' slots (max_num_seqs: padding). Can be captured; `mode` is
        "greedy" or "drawn". `turn_R`: how many rows before it have the same slot; None: none has."""
        if mode == "greedy":
            zero_R, none_R = (tensor[: logits_RV.shape[0]] for tensor in self._nothing_R)
            return ops.sample(SampleCall(logits_RV, zero_R, none_R, none_R))
        temperature_R, top_p_R, min_p_R = self._float_6S[:3].index_select(1, slot_R)
        top_k_R, seed_R, position_R = self._int_3S.index_select(1, slot_R)
        if turn_R is not None:
            position_R = position_R + turn_R
        truncation = top_k_R.int(), top_p_R, min_p_R
        token_R = ops.sample(SampleCall(logits_RV, temperature_R, seed_R, position_R, *truncation))
        self._position_S.index_add_(0, slot_R, torch.ones_like(slot_R))
        return token_R

    def _plan(self, slots: list[int]) -> SamplingPlan:
        key = tuple(slots)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(slots)
        return plan

    def _change_logits(self, plan: SamplingPlan, logits_RV: torch.Tensor) -> None:
        if plan.allowed is not None:
            self._mask(logits_RV, *plan.allowed)
        if plan.matcher_row_N is not None:
            shape = len(plan.matchers), (self.vocab_size + 31) // 32
            # Fresh in every step: the device may still be reading the last one.
            allowed_NM = torch.empty(shape, dtype=torch.int32, pin_memory=self._pinned)
            fill_masks(plan.matchers, allowed_NM)
            self._mask(logits_RV, plan.matcher_row_N, allowed_NM.to(self.device, non_blocking=True))
        if plan.edits is not None:
            edits, value_E = plan.edits, plan.edits.value_E
            if edits.until_E is not None:
                value_E = torch.where(self._position_S[edits.slot_E] < edits.until_E, value_E, 0.0)
            logits_RV.view(-1).index_add_(0, edits.index_E, value_E)
        hits = [row * self.vocab_size + token for row, occupant in plan.bad for token in occupant.completing()]
        if hits:
            logits_RV.view(-1).index_fill_(0, self._upload(hits), FORBIDDEN)
        if plan.penalty is not None:
            penalty, table = plan.penalty, self._penalties
            for part in chunks(penalty.row_N.shape[0], self.vocab_size):
                row_N, table_row_N = penalty.row_N[part], penalty.table_row_N[part]
                amounts = [amount_N[part] for amount_N in penalty.amounts]
                tables = table.count_PV, table.prompt_PV, table_row_N
                ops.penalize(PenalizeCall(logits_RV, row_N, *tables, *amounts))

    def _mask(self, logits_RV: torch.Tensor, row_N: torch.Tensor, allowed_NM: torch.Tensor) -> None:
        for part in chunks(row_N.shape[0], self.vocab_size):
            ops.mask_logits(logits_RV, row_N[part], allowed_NM[part])

    def _choose(self, plan: SamplingPlan, logits_RV: torch.Tensor) -> torch.Tensor:
        if plan.greedy:
            token_R = _best(logits_RV)
        else:
            token_R = torch.empty(logits_RV.shape[0], dtype=torch.int64, device=self.device)
        for draw in plan.draws:
            position_N = self._position_S[draw.slot_N]
            for part in chunks(draw.slot_N.shape[0], self.vocab_size):
                row_N = part if draw.row_N is None else draw.row_N[part]
                temperature_N, seed_N, *truncation = (argument_N[part] for argument_N in draw.arguments)
                call = SampleCall(logits_RV[row_N], temperature_N, seed_N, position_N[part], *truncation)
                token_R[row_N] = ops.sample(call)
        return token_R

    # -- when the batch changes ----------------------------------------------------------------------------------------

    def _make_plan(self, slots: list[int]) -> SamplingPlan:
        row_of = dict(zip(slots, range(len(slots))))

        def with_trait(trait: Trait) -> list[tuple[int, int, Occupant]]:
            found = sorted((row_of[slot], slot) for slot in self._slots_with[trait] if slot in row_of)
            return [(row, slot, self._occupant(slot)) for row, slot in found]

        slot_R = self._upload(slots)
        plan = SamplingPlan(self._some(("greedy",), slots), slot_R, torch.ones_like(slot_R))
        # Both give the same token where nothing is filtered out; without filters there is less to do.
        for trait in RANDOM:
            if rows := [row for row, slot in enumerate(slots) if slot in self._slots_with[trait]]:
                row_N = None if len(rows) == len(slots) else self._upload(rows)
                slot_N = slot_R if row_N is None else slot_R[row_N]
                temperature_N, top_p_N, min_p_N = self._float_6S[:3, slot_N]
                top_k_N, seed_N = self._int_3S[:2, slot_N]
                filters = [top_k_N.int(), top_p_N, min_p_N] if trait == "filtered" else []
                plan.draws.append(Draw(row_N, slot_N, [temperature_N, seed_N, *filters]))
        if edited := with_trait("edited"):
            plan.edits = self._plan_edits(edited)
        if masked := with_trait("masked"):
            masks = [o.allowed_M for _, _, o in masked if o.allowed_M is not None]
            plan.allowed = self._upload([row for row, _, _ in masked]), torch.stack(masks)
        if penalized := with_trait("penalized"):
            plan.penalty = self._plan_penalty(penalized)

        needing_host = with_trait("needs_host")
        plan.needing_host = [o for _, _, o in needing_host]
        plan.bad = [(row, o) for row, _, o in needing_host if o.bad_sequences]
        if matched := [(row, o.matcher) for row, _, o in needing_host if o.matcher is not None]:
            plan.matchers = [matcher for _, matcher in matched]
            plan.matcher_row_N = self._upload([row for row, _ in matched])
        if asked := with_trait("logprobs"):
            plan.logprobs_rows = [row for row, _, _ in asked]
            plan.top_n = max(o.params.logprobs or 0 for _, _, o in asked)
            if len(asked) < len(slots):
                plan.logprobs_row_L = self._upload(plan.logprobs_rows)
        return plan

    def _plan_edits(self, edited: list[tuple[int, int, Occupant]]) -> Edits:
        counts = [len(o.edits) for _, _, o in edited]
        row_N, slot_N, count_N = self._upload([[row for row, _, _ in edited], [slot for _, slot, _ in edited], counts])
        # The number of edits is given so that the device need not be asked for it.
        place_E = torch.arange(len(edited), device=self.device).repeat_interleave(count_N, output_size=sum(counts))
        tokens, values, untils = zip(*((o.edit_token_E, o.edit_value_E, o.edit_until_E) for _, _, o in edited))
        index_E = row_N[place_E] * self.vocab_size + torch.cat(tokens)
        timed = any(o.timed for _, _, o in edited)
        return Edits(index_E, torch.cat(values), slot_N[place_E], torch.cat(untils) if timed else None)

    def _plan_penalty(self, penalized: list[tuple[int, int, Occupant]]) -> Penalty:
        row_N, slot_N, table_row_N = self._upload(
            list(zip(*((row, slot, o.penalty_row) for row, slot, o in penalized)))
        )
        amounts = list(self._float_6S[3:, slot_N])
        return Penalty(row_N, table_row_N, amounts, torch.ones_like(row_N, dtype=torch.int32))

    def _join(self) -> None:
        """Upload the parameters of new requests."""
        slots: list[int] = []
        floats: list[tuple[float, ...]] = []
        ints: list[tuple[int, ...]] = []
        for slot, occupant in self._joining.items():
            p = occupant.params
            slots.append(slot)
            floats.append(
                (p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
            )
            ints.append((min(max(p.top_k, 0), self.vocab_size), self._seed(occupant.request), len(occupant.output_ids)))
            if occupant.edits:
                tokens, values, untils = zip(*occupant.edits)
                occupant.edit_token_E, occupant.edit_until_E = self._upload([tokens, untils])
                occupant.edit_value_E = self._upload(values, torch.float32)
            if p.allowed_token_ids:
                allowed_1V = torch.zeros(1, self.vocab_size, dtype=torch.bool)
                allowed_1V[0, list(p.allowed_token_ids)] = True
                occupant.allowed_M = self._upload(pack_mask(allowed_1V)[0].tolist(), torch.int32)
            if "penalized" in occupant.traits:
                prompt, output = self._upload(occupant.request.prompt_ids), self._upload(occupant.output_ids)
                occupant.penalty_row = self._penalties.take(prompt, output)
        if slots:
            slot_N = self._upload(slots)
            self._float_6S[:, slot_N] = self._upload(floats, torch.float32).T
            self._int_3S[:, slot_N] = self._upload(ints).T
        self._joining.clear()

    def _seed(self, request: Request) -> int:
        """A request without a seed gets one from its id and the engine's seed."""
        if request.params.seed is not None:
            return request.params.seed
        digest = hashlib.blake2b(f"{self.seed} {request.id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _upload(self, values: Sequence[object], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """To the device, without waiting for it."""
        return torch.tensor(values, dtype=dtype, pin_memory=self._pinned).to(self.device, non_blocking=True)

    def _occupant(self, slot: int) -> Occupant:
        occupant = self.slots[slot]
        assert occupant is not None, f"slot {slot} is empty"
        return occupant

    def check(self) -> None:
        """Every row of the penalty table is free or belongs to exactly one request; no plan has empty slots."""
        taken = [o.penalty_row for o in self.slots if o is not None and o.penalty_row is not None]
        assert sorted([*taken, *self._penalties.free]) == list(range(self._penalties.count_PV.shape[0]))
        assert all(self.slots[slot] is occupant for slot, occupant in self._joining.items())
        assert self._empty == {slot for slot, o in enumerate(self.slots) if o is None}
        for trait, slots in self._slots_with.items():
            assert slots == {slot for slot, o in enumerate(self.slots) if o is not None and trait in o.traits}, trait
        assert all(self.slots[slot] is not None for key in self._plans for slot in key)


def _turns(slots: list[int]) -> list[int]:
    """How many rows before it have the same slot."""
    seen: Counter[int] = Counter()
    turns = []
    for slot in slots:
        turns.append(seen[slot])
        seen[slot] += 1
    return turns


def captured_turns(slot_R: torch.Tensor) -> torch.Tensor:
    """The same on the device, where the rows of a slot follow one another. Can be captured."""
    row_R = torch.arange(slot_R.shape[0], device=slot_R.device)
    return row_R - torch.where(slot_R == slot_R.roll(1), 0, row_R).cummax(0).values


def _best(logits_RV: torch.Tensor) -> torch.Tensor:
    """The first of equal maxima, as argmax, which takes half as long again on a CPU. Rows without a token give what
    ops.sample gives for them."""
    best_R, token_R = logits_RV.max(-1)
    return or_reason(token_R, best_R)
