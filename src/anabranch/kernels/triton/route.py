"""Logits → experts and weights in one kernel, each row's logits read once.

T tokens, E experts, K chosen per token; R rows of a program, L lanes that share a row, P = K rounded up to a power of
two.

How the winners are found: a lane reads 16 bytes at a time and keeps what it read in registers as *keys*, integers
whose order is the order of the choice: the logit's bits made monotone above, the inverted expert id below, so that
no two keys are equal and a tie goes to the lowest id. Sorting networks bring its keys into sorted lists of P and merge
them into one; then lanes exchange lists and merge, log2 L times. There is no loop over k. Many lanes per row (16 with 8
experts each) give the shortest way for few rows, few lanes (2 with 64 each) the least work for many.

Keys are 32 bits wide. bf16 and fp16 leave room for the id. fp32 does not: there the lowest bits give way to it, and
where that could matter (two of the first K + 1 agree in all other bits) the row is done once more, in K rounds of
maximum and lowest id.

A NaN logit makes the row's weights NaN; its experts are still distinct.
"""

# A tuple of Triton's may change its length:
# mypy: disable-error-code="assignment, index, misc"

import functools
import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from anabranch import ops
from anabranch.kernels.triton.launch import (
    FLOATS,
    cdiv,
    launch_options,
    machine_of,
    next_power_of_2,
    wait_for_predecessor,
)
from anabranch.kernels.triton.sample_search import LOWEST, from_key, to_key
from anabranch.kernels.triton.sorted_lists import best_of, pack, unpack
from anabranch.ops.route import SCORES, RouteCall

MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 512, 16, 32
FEW_ROWS = 2048
"""Up to here the time of one program counts; beyond, the work of all."""
NUM_LANES = 64 if torch.version.hip else 32
"""Of a warp, which is a program: what it has to wait for is its own rows only."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# Keys


@triton.jit
def _load(row, is_token_R, expert_RLV, E: tl.constexpr):
    """Each row's logits in chunks [R, L, V]: all loads are under way before the first is used."""
    STEP: tl.constexpr = expert_RLV.shape[1] * expert_RLV.shape[2]
    chunks = ()
    for i in tl.static_range((E + STEP - 1) // STEP):
        mask = is_token_R[:, None, None]
        if (i + 1) * STEP > E:
            mask = mask & (expert_RLV + i * STEP < E)
        chunks = chunks + (tl.load(row[:, None, None] + (expert_RLV + i * STEP), mask=mask, other=0.0),)
    return chunks


@triton.jit
def _probability(x):
    """sigmoid, to the bit as torch computes it on a GPU: where a bias is added, a last bit can change the choice."""
    if INTERPRETED:
        return 1 / (1 + tl.exp(-x))
    else:
        return tl.div_rn(1.0, 1 + libdevice.exp(-x))


@triton.jit
def _choice(logit, expert, bias, softmax, E: tl.constexpr, SIGMOID: tl.constexpr):
    """What the selection goes by. `softmax`: the peak and the total that make probabilities, where a bias is added."""
    choice = logit.to(tl.float32)
    if SIGMOID:
        choice = _probability(choice)
    elif softmax is not None:
        if INTERPRETED:
            choice = tl.exp(choice - softmax[0]) / softmax[1]
        else:
            choice = tl.div_rn(libdevice.exp(choice - softmax[0]), softmax[1])
    if bias is not None:
        choice += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)
    return choice


@triton.jit
def _ordered_choice(logit, expert, bias, softmax, groups, E: tl.constexpr, SIGMOID: tl.constexpr, GROUP: tl.constexpr):
    choice = _choice(logit, expert, bias, softmax, E, SIGMOID)
    if groups is not None:
        choice = tl.where((groups >> (expert // GROUP)) & 1 != 0, choice, float("-inf"))
    return to_key(choice)


@triton.jit
def _keys(
    chunks, expert_RLV, bias, softmax, groups, E: tl.constexpr, SIGMOID: tl.constexpr, GROUP: tl.constexpr,
    ID_BITS: tl.constexpr, EXACT: tl.constexpr, LOG: tl.constexpr, LOG_VECTOR: tl.constexpr,
):  # fmt: skip
    """Each lane's keys [R, L], rounded up to whole lists with keys that never win."""
    STEP: tl.constexpr = expert_RLV.shape[1] * expert_RLV.shape[2]
    keys = ()
    for i in tl.static_range(len(chunks)):
        expert = expert_RLV + i * STEP
        ordered = _ordered_choice(chunks[i], expert, bias, softmax, groups, E, SIGMOID, GROUP)
        inverted = ((1 << ID_BITS) - 1) - expert
        key = ordered + inverted if EXACT else (ordered & (-1 << ID_BITS)) | inverted
        if (i + 1) * STEP > E:
            key = tl.where(expert < E, key, LOWEST)
        keys = keys + unpack(key, LOG_VECTOR)
    for _ in tl.static_range(-len(keys) % (1 << LOG)):
        keys = keys + (tl.full(keys[0].shape, LOWEST, tl.int32),)
    return keys


@triton.jit
def _unsure(best, keys, E: tl.constexpr, K: tl.constexpr, ID_BITS: tl.constexpr, LOG: tl.constexpr):
    """Rows [R] where bits that the id took could decide."""
    unsure_R = best[0] != best[0]
    for i in tl.static_range(min(K, (1 << LOG) - 1)):
        unsure_R |= (best[i] ^ best[i + 1]) >> ID_BITS == 0
    if (1 << LOG) == K and E > K:  # the runner-up is not on the list: does another expert reach the last winner?
        last_R = best[K - 1] & (-1 << ID_BITS)
        reach_RL = tl.zeros(keys[0].shape, tl.int32)
        for i in tl.static_range(len(keys)):
            reach_RL += (keys[i] >= last_R[:, None]).to(tl.int32)
        unsure_R |= tl.sum(reach_RL, 1) > K
    return unsure_R


@triton.jit
def _select_in_rounds(
    row, bias, softmax, groups, E: tl.constexpr, E_P: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr,
    GROUP: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """One row, exact for any bits, by the whole warp: K times the best choice and, among equals, the lowest id."""
    expert = tl.arange(0, E_P)
    logit = tl.load(row + expert, mask=expert < E, other=0.0)
    ordered = tl.where(expert < E, _ordered_choice(logit, expert, bias, softmax, groups, E, SIGMOID, GROUP), LOWEST)
    slot_K = tl.arange(0, 1 << LOG)
    id_K = tl.zeros((1 << LOG,), tl.int32)
    for k in range(K):
        is_best = ordered == tl.max(ordered, 0)
        winner = tl.min(tl.where(is_best, expert, E_P), 0)
        ordered = tl.where(expert == winner, LOWEST, ordered)
        id_K = tl.where(slot_K == k, winner, id_K)
    return id_K


@triton.jit
def _best_two(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(tl.minimum(a0, b0), tl.maximum(a1, b1))


@triton.jit
def _allowed_groups(
    row, is_token_R, bias, softmax,
    E: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_P: tl.constexpr,
):  # fmt: skip
    """Bit g of a row: experts of group g may be chosen."""
    GROUP: tl.constexpr = E // GROUPS
    group_G, member_S = tl.arange(0, GROUPS_P), tl.arange(0, GROUP_P)
    expert_GS = group_G[:, None] * GROUP + member_S[None, :]
    is_expert_GS = (group_G < GROUPS)[:, None] & (member_S < GROUP)[None, :]
    logit = tl.load(
        row[:, None, None] + expert_GS[None], mask=is_token_R[:, None, None] & is_expert_GS[None], other=0.0
    )
    choice = _choice(logit, tl.where(is_expert_GS, expert_GS, E)[None], bias, softmax, E, SIGMOID)
    choice = tl.where(is_expert_GS[None], choice, float("-inf"))
    if bias is None or GROUP == 1:
        score_RG = tl.max(choice, 2)
    else:
        first_RG, second_RG = tl.reduce((choice, tl.full(choice.shape, float("-inf"), tl.float32)), 2, _best_two)
        score_RG = first_RG + second_RG
    left_RG = tl.where((group_G < GROUPS)[None, :], to_key(score_RG), LOWEST)
    allowed_R = tl.zeros((row.shape[0],), tl.int32)
    for _ in range(TOP_GROUPS):
        is_best = left_RG == tl.max(left_RG, 1)[:, None]
        winner_R = tl.min(tl.where(is_best, group_G[None, :], GROUPS_P), 1)
        allowed_R |= 1 << winner_R
        left_RG = tl.where(group_G[None, :] == winner_R[:, None], LOWEST, left_RG)
    return allowed_R


@triton.jit
def _softmax(chunks, expert_RLV, E: tl.constexpr):
    """Each row's peak, and the sum of exp(logit − peak) over all experts."""
    STEP: tl.constexpr = expert_RLV.shape[1] * expert_RLV.shape[2]
    peak_R = tl.full((chunks[0].shape[0],), float("-inf"), tl.float32)
    for i in tl.static_range(len(chunks)):
        logit = tl.where(expert_RLV + i * STEP < E, chunks[i].to(tl.float32), float("-inf"))
        peak_R = tl.maximum(peak_R, tl.max(tl.max(logit, 2), 1))
    peak_R = tl.where(peak_R == float("-inf"), 0.0, peak_R)
    total_R = tl.zeros(peak_R.shape, tl.float32)
    for i in tl.static_range(len(chunks)):
        term = tl.exp(chunks[i].to(tl.float32) - peak_R[:, None, None])
        total_R += tl.sum(tl.sum(tl.where(expert_RLV + i * STEP < E, term, 0.0), 2), 1)
    return peak_R, tl.where(total_R == 0, 1.0, total_R)


# The kernel


@triton.jit(do_not_specialize=["num_rows", "stride", "scaling"])
def route_kernel(
    logits, weight, expert, select_bias, expert_scale, num_tokens, num_rows, stride, scaling,
    E: tl.constexpr, K: tl.constexpr, LOG: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_P: tl.constexpr,
    ID_BITS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, LOG_VECTOR: tl.constexpr,
    TRIGGER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`stride` counts vectors, so that the compiler sees that rows are aligned."""
    CHUNK: tl.constexpr = LANES * VECTOR
    CHUNKS: tl.constexpr = (E + CHUNK - 1) // CHUNK
    SHORT: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16
    EXACT: tl.constexpr = SHORT and not SIGMOID and select_bias is None
    IN_KEY: tl.constexpr = EXACT and GROUPS == 1

    # With many rows, waiting kernels would only take the place of programs that work.
    wait_for_predecessor(DEPENDENT, trigger=TRIGGER)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_R = row_R < num_rows
    is_token_R = is_row_R
    if num_tokens is not None:
        is_token_R = is_row_R & (row_R < tl.load(num_tokens))
    row = logits + row_R.to(tl.int64) * (stride * VECTOR)
    expert_RLV = (tl.arange(0, LANES) * VECTOR)[None, :, None] + tl.arange(0, VECTOR)[None, None, :]

    chunks = _load(row, is_token_R, expert_RLV, E)
    BY_SHARE: tl.constexpr = select_bias is not None and not SIGMOID
    peak_R = None
    whole_R = None
    softmax = None
    if BY_SHARE:
        peak_R, whole_R = _softmax(chunks, expert_RLV, E)
        softmax = (peak_R[:, None, None], whole_R[:, None, None])
    groups_R = None
    groups = None
    if GROUPS > 1:
        groups_R = _allowed_groups(
            row, is_token_R, select_bias, softmax, E, SIGMOID, GROUPS, GROUPS_P, TOP_GROUPS, GROUP_P
        )
        groups = groups_R[:, None, None]

    keys = _keys(
        chunks, expert_RLV, select_bias, softmax, groups, E, SIGMOID, E // GROUPS, ID_BITS, EXACT, LOG, LOG_VECTOR
    )
    best = best_of(keys, LOG)
    key_RK = pack(best, LOG)
    id_RK = ((1 << ID_BITS) - 1) - (key_RK & ((1 << ID_BITS) - 1))
    if not EXACT:
        unsure_R = _unsure(best, keys, E, K, ID_BITS, LOG) & is_token_R
        place_R = tl.arange(0, ROWS)
        if tl.max(unsure_R.to(tl.int32), 0) != 0:
            for r in range(ROWS):
                if tl.max((unsure_R & (place_R == r)).to(tl.int32), 0) != 0:
                    one = logits + (tl.program_id(0) * ROWS + r).to(tl.int64) * (stride * VECTOR)
                    its_groups = None
                    if GROUPS > 1:
                        its_groups = tl.sum(tl.where(place_R == r, groups_R, 0), 0)
                    its_softmax = None
                    if BY_SHARE:
                        is_it_R = place_R == r
                        its_peak = tl.sum(tl.where(is_it_R, peak_R, 0.0), 0)
                        its_softmax = (its_peak, tl.sum(tl.where(is_it_R, whole_R, 0.0), 0))
                    id_K = _select_in_rounds(
                        one, select_bias, its_softmax, its_groups, E, 1 << ID_BITS, K, SIGMOID, E // GROUPS, LOG
                    )
                    id_RK = tl.where((place_R == r)[:, None], id_K[None, :], id_RK)

    slot_K = tl.arange(0, 1 << LOG)
    is_slot_RK = tl.broadcast_to((slot_K < K)[None, :], id_RK.shape)
    if IN_KEY:
        logit_RK = from_key(key_RK & (-1 << ID_BITS))
    else:
        logit_RK = tl.load(row[:, None] + id_RK, mask=is_slot_RK & is_token_R[:, None], other=0.0).to(tl.float32)

    if SIGMOID:
        weight_RK = tl.where(is_slot_RK, _probability(logit_RK), 0.0)
    else:
        logit_RK = tl.where(is_slot_RK, logit_RK, float("-inf"))
        if not BY_SHARE:  # else the best logit need not be among the chosen
            peak_R = tl.max(logit_RK, 1)
            peak_R = tl.where(peak_R == float("-inf"), 0.0, peak_R)
        weight_RK = tl.exp(logit_RK - peak_R[:, None])
    if RENORMALIZE:
        total_R = tl.sum(weight_RK, 1)
    elif not SIGMOID:
        total_R = tl.zeros((ROWS,), tl.float32)
        for i in tl.static_range(CHUNKS):
            term = tl.exp(chunks[i].to(tl.float32) - peak_R[:, None, None])
            if (i + 1) * CHUNK > E:
                term = tl.where(expert_RLV + i * CHUNK < E, term, 0.0)
            total_R += tl.sum(tl.sum(term, 2), 1)
    if RENORMALIZE or not SIGMOID:
        weight_RK *= (1 / tl.where(total_R == 0, 1.0, total_R))[:, None]  # zeros stay zeros
    weight_RK *= scaling
    if expert_scale is not None:
        weight_RK *= tl.load(expert_scale + id_RK, mask=is_slot_RK, other=0.0).to(tl.float32)
    if num_tokens is not None:
        weight_RK = tl.where(is_token_R[:, None], weight_RK, 0.0)
        id_RK = tl.where(is_token_R[:, None], id_RK, -1)

    place_RK = row_R.to(tl.int64)[:, None] * K + slot_K[None, :]
    tl.store(weight + place_RK, weight_RK, mask=is_row_R[:, None] & is_slot_RK)
    tl.store(expert + place_RK, id_RK, mask=is_row_R[:, None] & is_slot_RK)


def accepts(call: RouteCall) -> bool:
    logits_TE, num_experts = call.logits_TE, call.logits_TE.shape[1]
    return (
        logits_TE.dtype in FLOATS
        and logits_TE.stride(1) == 1
        and 2 <= num_experts <= MAX_EXPERTS
        and 1 <= call.top_k <= min(MAX_TOP_K, num_experts)
        and call.score in SCORES
        and call.num_groups <= MAX_GROUPS
        and num_experts % call.num_groups == 0
        and all(vector is None or vector.is_contiguous() for vector in (call.select_bias_E, call.expert_scale_E))
    )


@ops.route.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def route(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TE, top_k = call.logits_TE, call.top_k
    num_rows, num_experts = logits_TE.shape
    weight_TK = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits_TE.device)
    expert_TK = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits_TE.device)
    if num_rows == 0:
        return weight_TK, expert_TK
    vector = vector_size(logits_TE)
    few = num_rows <= FEW_ROWS or machine_of(logits_TE.device).fixed
    num_bytes = logits_TE.element_size()
    constants = choose_constants(few, num_experts, top_k, num_bytes, vector, call.num_groups)
    route_kernel[(cdiv(num_rows, constants["ROWS"]),)](
        logits_TE, weight_TK, expert_TK, call.select_bias_E, call.expert_scale_E, call.num_tokens, num_rows,
        logits_TE.stride(0) // vector, call.scaling,
        SIGMOID=call.score == "sigmoid", RENORMALIZE=call.renormalize, TOP_GROUPS=call.top_groups,
        **constants, num_warps=1, **launch_options(logits_TE.device),
    )  # fmt: skip
    return weight_TK, expert_TK


@functools.cache
def choose_constants(
    few: bool, num_experts: int, top_k: int, num_bytes: int, vector: int, num_groups: int, num_lanes: int = NUM_LANES
) -> dict[str, int | bool]:
    """Two versions for a model, with few and with many rows: a step of any size needs no more compiling.

    With groups there is one: the tile that groups are judged by would not fit into registers with few lanes.
    """
    lists = next_power_of_2(top_k)
    per_lane = max(8 if few or num_groups > 1 else 128 // num_bytes, lists, vector)
    lanes = min(num_lanes, next_power_of_2(cdiv(num_experts, per_lane)))
    return {
        "E": num_experts,
        "K": top_k,
        "LOG": lists.bit_length() - 1,
        "GROUPS": num_groups,
        "GROUPS_P": next_power_of_2(num_groups),
        "GROUP_P": next_power_of_2(num_experts // num_groups),
        "ID_BITS": (num_experts - 1).bit_length(),
        "ROWS": num_lanes // lanes,
        "LANES": lanes,
        "VECTOR": vector,
        "LOG_VECTOR": vector.bit_length() - 1,
        "TRIGGER": few,
    }


def vector_size(logits_TE: torch.Tensor) -> int:
    """Logits that one load may fetch: up to 16 bytes, and rows and their ends must be aligned to it."""
    if logits_TE.data_ptr() % 16:
        return 1
    return math.gcd(16 // logits_TE.element_size(), logits_TE.shape[1], logits_TE.stride(0))
