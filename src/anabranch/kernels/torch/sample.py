"""Sampling on a CPU without a sort of the vocabulary: each row is reduced to the few tokens that can win, and only
these are computed exactly (ops/exact.py), for all rows at once. The tokens are the reference's, always.

R requests, V vocabulary, S stretches of W tokens, M tokens of some stretches, N some of those.

* The maximum of each stretch is cheap and shows which stretches to read.
* top_k: k tokens reach the k-th largest of these maxima, so none below it is among the top k.
* top_p alone: a token is drawn from all. Mostly it is allowed; if not, only those ranked before it can be.
* Noise: cheap bounds leave some thirty tokens of a row that need it exactly.
"""

import functools
import math

import torch

from anabranch import ops
from anabranch.ops import exact
from anabranch.ops.sample import NONE_ALLOWED, NOT_FINITE, TINY, SampleCall

STRETCH = 128
MIN_VOCABULARY = 8192
"""Below, the reference's few calls are faster than a loop over rows."""
FEW = 256
"""Up to this many tokens get exact noise without computing bounds."""
BOUND_AT_0, BOUND_STEP = (31 + 127) * math.log(2) + 1e-3, -math.log(2) * 2.0**-23
GAP = 3.2
"""Noise is at least its bound less this."""
SPREAD = 25.8
"""All noise lies in a range of this width."""
WEIGHTLESS = 21.6
"""Tokens this far below the best have no mass."""

Candidates = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(logit after temperature, hash, id) of tokens among which the winner is."""


class Row:
    """One request's logits, and the noise of its seed and position."""

    def __init__(self, logit_V: torch.Tensor, scale: float, seed: int, position: int) -> None:
        self.logit_M = pad(logit_V, -math.inf)
        self.logit_SW = self.logit_M.view(-1, STRETCH)
        self.peak_S = self.logit_SW.amax(1)
        self.top = self.peak_S.amax()
        self.scale = scale
        self.state = exact.stream(seed, position)

    def relative(self, logit_N: torch.Tensor) -> torch.Tensor:
        """Logits relative to the best, after temperature."""
        return (logit_N * self.scale).sub_(self.top * self.scale)

    def below_top(self, distance: float) -> float:
        """A logit this far below the best after temperature, or a little farther."""
        top = self.top.item()
        return top - distance / self.scale - 1e-6 * (abs(top) + distance / self.scale)

    def best(self) -> int:
        """The id of the best token, the lowest among equals."""
        stretch = int((self.peak_S == self.top).nonzero()[0])
        return STRETCH * stretch + int((self.logit_SW[stretch] == self.top).nonzero()[0])

    def stretches(self, least: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(logit_M, id_M) of stretches with a token of at least this logit."""
        stretch_N = (self.peak_S >= least).nonzero()[:, 0]
        if 2 * stretch_N.shape[0] > self.peak_S.shape[0]:
            return self.logit_M, ids(self.logit_M.shape[0])
        id_NW = (stretch_N.int() * STRETCH)[:, None] + ids(STRETCH)
        return self.logit_SW.index_select(0, stretch_N).view(-1), id_NW.view(-1)

    def at_least(self, least: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(logit_N, id_N) of all tokens of at least this logit, ids rising."""
        logit_M, id_M = self.stretches(least)
        place_N = torch.ge(logit_M, least, out=torch.empty_like(logit_M)).nonzero()[:, 0]  # bool would take far longer
        return logit_M[place_N], id_M[place_N]

    def candidates(self, logit_M: torch.Tensor, id_M: torch.Tensor) -> Candidates:
        """Those of these tokens that can be the best after noise."""
        hash_M, scaled_M = hashes(self.state, id_M), logit_M * self.scale
        if logit_M.shape[0] <= FEW:
            return scaled_M, hash_M, id_M
        # −ln(−ln(1 − v)) < −ln v, and the bits of a float are a logarithm, too low by at most 0.09.
        bound_M = (hash_M >> 1).bitwise_and_(0x7FFFFFFF).float().add_(0.25).view(torch.int32).float()
        bound_M.mul_(BOUND_STEP).add_(BOUND_AT_0).add_(scaled_M)
        scaled_M, hash_M, id_M = (pad(x, 0) for x in (scaled_M, hash_M, id_M))
        bound_SW = pad(bound_M, -math.inf).view(-1, STRETCH)
        bound_S = bound_SW.amax(1)
        least = bound_S.amax() - GAP
        stretch_N = (bound_S >= least).nonzero()[:, 0]
        close_N = (bound_SW.index_select(0, stretch_N) >= least).view(-1).nonzero()[:, 0]
        place_N = stretch_N[close_N // STRETCH] * STRETCH + close_N % STRETCH
        return scaled_M[place_N], hash_M[place_N], id_M[place_N]

    def from_all(self) -> Candidates:
        """Candidates where all tokens are allowed."""
        return self.candidates(*self.stretches(self.below_top(SPREAD)))

    def from_truncated(self, top_k: int, top_p: torch.Tensor, min_p: torch.Tensor) -> Candidates:
        """Candidates with top_k, or with min_p alone."""
        if top_k:
            logit_N, id_N = self._top(top_k)
        else:
            logit_N, id_N = self.at_least(self.below_top(-math.log(max(min(float(min_p), 1.0), TINY)) + 1e-3))
        kept_N = self._passes(logit_N, min_p)
        if top_p < 1:
            mass_N = mass(self.relative(logit_N)).double()
            kept_N &= mass_N.cumsum(0) - mass_N < exact.target_mass(mass_N.sum().long(), top_p)
        return self.candidates(logit_N[kept_N], id_N[kept_N])

    def from_allowed(self, drawn: int, top_p: torch.Tensor, min_p: torch.Tensor) -> Candidates | None:
        """Candidates without top_k, if the token that was drawn from all is excluded; None: it is allowed."""
        logit_N, id_N = self._ranked_before(drawn)
        mass_N = mass(self.relative(logit_N)).double()
        logit_M, _ = self.stretches(self.below_top(WEIGHTLESS))
        goal = exact.target_mass(mass(self.relative(logit_M)).double().sum().long(), top_p)
        if mass_N.sum() < goal and self._passes(self.logit_M[drawn], min_p):
            return None
        logit_N, order_N = logit_N.sort(descending=True, stable=True)
        mass_N, id_N = mass_N[order_N], id_N[order_N]
        kept_N = self._passes(logit_N, min_p) & (mass_N.cumsum(0) - mass_N < goal)
        return self.candidates(logit_N[kept_N], id_N[kept_N])

    def _passes(self, logit_N: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
        """Whether min_p allows tokens."""
        if min_p <= 0:
            return torch.ones_like(logit_N, dtype=torch.bool)
        return self.relative(logit_N) >= exact.log(min_p.float().clamp(TINY, 1.0))

    def _top(self, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best k, in their order."""
        source = self.peak_S if top_k <= self.peak_S.shape[0] else self.logit_M
        least = source.topk(min(top_k, source.shape[0])).values[-1].item()
        logit_N, id_N = self.at_least(least)
        logit_N, order_N = logit_N.sort(descending=True, stable=True)
        return logit_N[:top_k], id_N[order_N[:top_k]]

    def _ranked_before(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids rising."""
        logit = self.logit_M[token].item()
        logit_N, id_N = self.at_least(logit)
        before_N = ((logit_N > logit) | (id_N < token)).nonzero()[:, 0]
        return logit_N[before_N], id_N[before_N]


def winners(candidates: list[Candidates]) -> list[int]:
    """The winner of each: the best after noise, the lowest id among equals."""
    if not candidates:
        return []
    scaled_N, hash_N, id_N = (torch.cat(parts) for parts in zip(*candidates))
    sizes = torch.tensor([ids.shape[0] for _, _, ids in candidates])
    row_N = torch.arange(len(candidates)).repeat_interleave(sizes)
    noisy_N = scaled_N + exact.noise(hash_N.long() & 0xFFFFFFFF)
    best_R = noisy_N.new_full((len(candidates),), -math.inf).scatter_reduce_(0, row_N, noisy_N, "amax")
    id_N = torch.where(noisy_N == best_R[row_N], id_N, 2**31 - 1)
    return id_N.new_full((len(candidates),), 2**31 - 1).scatter_reduce_(0, row_N, id_N, "amin").tolist()


@functools.lru_cache(maxsize=8)
def ids(number: int) -> torch.Tensor:
    return torch.arange(number, dtype=torch.int32)


def pad(x_N: torch.Tensor, value: float) -> torch.Tensor:
    """To whole stretches."""
    padding = -x_N.shape[0] % STRETCH
    return torch.nn.functional.pad(x_N, (0, padding), value=value) if padding else x_N


def hashes(state: int, id_M: torch.Tensor) -> torch.Tensor:
    """`exact.mix` of state and ids, in the 32 bits of int32."""
    x = (id_M ^ signed(state)).add_(signed(0x9E3779B9))
    shifted = torch.empty_like(x)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted).bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(shifted)
        if factor != 1:
            x.mul_(factor)
    return x


def signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def mass(relative_M: torch.Tensor) -> torch.Tensor:
    """`exact.mass` as fp32, which holds these integers exactly."""
    power_M = (relative_M * exact.LOG2_E).clamp_(min=-40.0)
    whole_M = power_M.floor()
    f_M = power_M.sub_(whole_M)
    y_M = f_M * exact.EXP2_COEFFICIENTS[0]
    for coefficient in exact.EXP2_COEFFICIENTS[1:]:
        y_M.add_(coefficient).mul_(f_M)
    y_M.add_(1.0).view(torch.int32).add_(whole_M.int().add_(exact.MASS_BITS).bitwise_left_shift_(23))
    return y_M.add_(0.5).trunc_()


def accepts(call: SampleCall) -> bool:
    logits_RV = call.logits_RV
    return logits_RV.is_floating_point() and logits_RV.stride(1) == 1 and logits_RV.shape[1] >= MIN_VOCABULARY


@ops.sample.kernel("torch", on=("cpu", "fake"), accepts=accepts)
def sample(call: SampleCall) -> torch.Tensor:
    logits_RV, top_k_R, top_p_R, min_p_R = call.logits_RV, call.top_k_R, call.top_p_R, call.min_p_R
    if top_k_R is None or top_p_R is None or min_p_R is None:
        min_p_R = torch.zeros_like(call.temperature_R)
        top_k_R, top_p_R = min_p_R.int(), min_p_R + 1
    scale_R = 1.0 / call.temperature_R.float()  # infinity for greedy rows, which do not use it
    tokens = [NONE_ALLOWED] * logits_RV.shape[0]
    random: dict[int, Row] = {}
    candidates: list[Candidates] = []
    unverified: list[int] = []
    """Rows with top_p alone: they draw from all tokens, and again where the drawn token is excluded."""
    values = (x.tolist() for x in (scale_R, top_k_R, top_p_R, min_p_R, call.seed_R, call.position_R))
    for r, (scale, top_k, top_p, min_p, seed, position) in enumerate(zip(*values)):
        row = Row(logits_RV[r].float(), scale, seed, position)
        if row.top == -math.inf:
            continue
        if not row.top < math.inf:  # the maximum of a row with NaN is NaN
            tokens[r] = NOT_FINITE
            continue
        if scale == math.inf:
            tokens[r] = row.best()
            continue
        random[r] = row
        if top_k or (top_p >= 1 and min_p > 0):
            candidates.append(row.from_truncated(top_k, top_p_R[r], min_p_R[r]))
        else:
            candidates.append(row.from_all())
            if top_p < 1:
                unverified.append(r)
    for r, token in zip(random, winners(candidates)):
        tokens[r] = token
    again = [(r, random[r].from_allowed(tokens[r], top_p_R[r], min_p_R[r])) for r in unverified]
    rejected = [(r, its) for r, its in again if its is not None]
    for (r, _), token in zip(rejected, winners([its for _, its in rejected])):
        tokens[r] = token
    return torch.tensor(tokens, dtype=torch.int64)
