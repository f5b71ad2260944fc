"""rope_store against norms, rotations and writes done head by head, with complex numbers."""

import pytest
import torch
import torch.nn.functional as F

from anabranch import ops
from anabranch.ops import RopeStoreCall

TOKENS, HEADS, KV_HEADS, DIM, PAIRS, PAGE_SIZE, EPS = 4, 4, 2, 12, 4, 4, 0.1
SLOTS = [9, -1, 0, 7]


def normed(heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """[heads, dim] of one token."""
    if weight is None:
        return heads
    over = weight.shape if weight.numel() == DIM else (heads.numel(),)
    return F.rms_norm(heads.reshape(-1, over[0]), over, weight, EPS).view_as(heads)


def turned(heads: torch.Tensor, angle_F: torch.Tensor) -> torch.Tensor:
    pairs = torch.complex(heads[:, :PAIRS], heads[:, PAIRS : 2 * PAIRS]) * torch.polar(torch.ones(PAIRS), angle_F)
    return torch.cat([pairs.real, pairs.imag, heads[:, 2 * PAIRS :]], dim=1)


@pytest.mark.parametrize("value_is_key", [False, True])
@pytest.mark.parametrize("v_norm", [False, True])
@pytest.mark.parametrize("norm", ["none", "head", "all"])
def test_head_by_head(norm: str, v_norm: bool, value_is_key: bool) -> None:
    q_THD, k_TGD, v_TGD = (torch.randn(TOKENS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    if value_is_key:
        v_TGD = k_TGD
    angle_TF = 10 * torch.rand(TOKENS, PAIRS)
    widths = {"none": None, "head": (DIM, DIM), "all": (HEADS * DIM, KV_HEADS * DIM)}[norm]
    q_weight, k_weight = (None, None) if widths is None else map(torch.rand, widths)
    pages = torch.randn(2, 3, PAGE_SIZE, KV_HEADS, DIM)
    before, given = pages.clone(), (q_THD.clone(), k_TGD.clone(), v_TGD.clone())
    found_THD = ops.rope_store.reference(
        RopeStoreCall(
            q_THD,
            k_TGD,
            v_TGD,
            angle_TF.cos(),
            angle_TF.sin(),
            q_weight,
            k_weight,
            v_norm,
            EPS,
            pages[0],
            pages[1],
            torch.tensor(SLOTS),
        )
    )
    expected = before
    for t, slot in enumerate(SLOTS):
        torch.testing.assert_close(found_THD[t], turned(normed(q_THD[t], q_weight), angle_TF[t]))
        if slot >= 0:
            value = normed(v_TGD[t], torch.ones(DIM)) if v_norm else v_TGD[t]
            expected[0, slot // PAGE_SIZE, slot % PAGE_SIZE] = turned(normed(k_TGD[t], k_weight), angle_TF[t])
            expected[1, slot // PAGE_SIZE, slot % PAGE_SIZE] = value
    torch.testing.assert_close(pages, expected)
    assert all(torch.equal(a, b) for a, b in zip((q_THD, k_TGD, v_TGD), given)), "writes over its input"


# ---------------------------------------------------------------------------------------------------------------------
# The KV write: without norms and with angles of zero, keys and values are stored as they are
# ---------------------------------------------------------------------------------------------------------------------


def store(
    k_TGD: torch.Tensor, v_TGD: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], slot_T: list[int]
) -> None:
    angle_TF = torch.zeros(len(slot_T), PAIRS)
    rest = (None, None, False, EPS, *pages, torch.tensor(slot_T, dtype=torch.int32))
    ops.rope_store.reference(RopeStoreCall(k_TGD, k_TGD, v_TGD, angle_TF.cos(), angle_TF.sin(), *rest))


def test_padding_alone_writes_nothing() -> None:
    k_PSGD, v_PSGD = torch.zeros(2, 3, PAGE_SIZE, KV_HEADS, DIM)
    nan = torch.full((3, KV_HEADS, DIM), float("nan"))
    store(nan, nan, (k_PSGD, v_PSGD), [-1, -1, -1])
    assert not k_PSGD.any() and not v_PSGD.any()


def test_rows_that_are_slices_land_in_their_slots() -> None:
    """Keys and values are slices of one packed projection, so their rows do not lie one after another."""
    packed = torch.randn(3, 4 * KV_HEADS, DIM)
    k_TGD, v_TGD = packed[:, 2 * KV_HEADS : 3 * KV_HEADS], packed[:, 3 * KV_HEADS :]
    k_PSGD, v_PSGD = torch.zeros(2, 3, PAGE_SIZE, KV_HEADS, DIM)
    store(k_TGD, v_TGD, (k_PSGD, v_PSGD), [0, 1, 2])
    assert torch.equal(k_PSGD[0, :3], k_TGD)
    assert torch.equal(v_PSGD[0, :3], v_TGD)


def test_pages_that_are_slices_are_written_too() -> None:
    """Keys and values next to each other in each page: neither can be seen as one flat list of slots."""
    both = torch.zeros(3, 2, PAGE_SIZE, KV_HEADS, DIM)
    k_TGD, v_TGD = torch.randn(2, 1, KV_HEADS, DIM)
    store(k_TGD, v_TGD, (both[:, 0], both[:, 1]), [5])
    assert torch.equal(both[1, :, 1], torch.stack([k_TGD[0], v_TGD[0]]))
