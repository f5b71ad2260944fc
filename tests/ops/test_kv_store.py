"""kv_store writes each token's row to its slot and nothing else."""

import torch

from anabranch import ops

PAGES, PAGE_SIZE, HEADS, DIM = 3, 4, 2, 8


def test_rows_land_in_their_slots_and_nowhere_else() -> None:
    k_TGD, v_TGD = torch.randn(2, 4, HEADS, DIM)
    k_PSGD, v_PSGD = torch.randn(2, PAGES, PAGE_SIZE, HEADS, DIM)
    before = k_PSGD.clone(), v_PSGD.clone()
    slots = [9, -1, 0, 7]  # page 2 slot 1, nowhere, page 0 slot 0, page 1 slot 3
    ops.kv_store.reference(k_TGD, v_TGD, k_PSGD, v_PSGD, torch.tensor(slots))
    for rows, pages, old in ((k_TGD, k_PSGD, before[0]), (v_TGD, v_PSGD, before[1])):
        expected = old.clone()
        for t, slot in enumerate(slots):
            if slot >= 0:
                expected[slot // PAGE_SIZE, slot % PAGE_SIZE] = rows[t]
        assert torch.equal(pages, expected)


def test_padding_alone_writes_nothing() -> None:
    k_PSGD, v_PSGD = torch.zeros(2, PAGES, PAGE_SIZE, HEADS, DIM)
    nan = torch.full((3, HEADS, DIM), float("nan"))
    ops.kv_store.reference(nan, nan, k_PSGD, v_PSGD, torch.full((3,), -1))
    assert not k_PSGD.any() and not v_PSGD.any()


def test_int32_slots_and_rows_that_are_slices() -> None:
    """Keys and values are slices of one packed projection, so their rows do not lie one after another."""
    packed = torch.randn(3, 4 * HEADS, DIM)
    k_TGD, v_TGD = packed[:, 2 * HEADS : 3 * HEADS], packed[:, 3 * HEADS :]
    k_PSGD, v_PSGD = torch.zeros(2, PAGES, PAGE_SIZE, HEADS, DIM)
    ops.kv_store.reference(k_TGD, v_TGD, k_PSGD, v_PSGD, torch.tensor([0, 1, 2], dtype=torch.int32))
    assert torch.equal(k_PSGD[0, :3], k_TGD)
    assert torch.equal(v_PSGD[0, :3], v_TGD)


def test_pages_that_are_slices_are_written_too() -> None:
    """Keys and values side by side in each page: neither can be seen as one flat list of slots."""
    both = torch.zeros(PAGES, 2, PAGE_SIZE, HEADS, DIM)
    k_TGD, v_TGD = torch.randn(2, 1, HEADS, DIM)
    ops.kv_store.reference(k_TGD, v_TGD, both[:, 0], both[:, 1], torch.tensor([5]))
    assert torch.equal(both[1, :, 1], torch.stack([k_TGD[0], v_TGD[0]]))
