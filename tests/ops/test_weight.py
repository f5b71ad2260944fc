"""A weight as a value: its bytes and format, and the part of each checkpoint tensor that a rank takes."""

import pytest
import torch

from anabranch.formats import PLAIN
from anabranch.ops.weight import Layout, Piece, Shard, Weight

Q, K = torch.randn(8, 3), torch.randn(4, 3)
GATE, UP = torch.randn(2, 6, 3), torch.randn(2, 6, 3)
TENSORS = {"q": Q, "k": K, "fused": torch.cat([GATE, UP], 1)}
TENSORS |= {f"{name}.{e}": part[e] for name, part in (("gate", GATE), ("up", UP)) for e in range(2)}
QKV: Layout = (Piece("q", (slice(0, 8),)), Piece("k", (slice(8, 12),)))
HALVES = slice(0, 6), slice(6, 12)
SPLIT: Layout = tuple(Piece(f"{n}.{e}", (e, rows)) for e in range(2) for n, rows in zip(("gate", "up"), HALVES))
FUSED: Layout = tuple(Piece("fused", (slice(None), rows), (slice(None), rows)) for rows in HALVES)


def assemble(layout: Layout, shape: tuple[int, ...], shard: Shard) -> torch.Tensor:
    local = torch.full(shard.shape(shape), float("nan"))
    for piece in shard.pieces(layout, shape):
        local[piece.index] = TENSORS[piece.name][piece.part]
    return local


@pytest.mark.parametrize("rank", [0, 1])
def test_each_section_is_divided_among_the_ranks(rank: int) -> None:
    rows = slice(4 * rank, 4 * rank + 4), slice(2 * rank, 2 * rank + 2)
    sections = (8, 2), (4, 2)
    assert torch.equal(assemble(QKV, (12, 3), Shard(0, rank, 2, sections)), torch.cat([Q[rows[0]], K[rows[1]]]))
    halves = tuple(
        Piece("q", (slice(r, r + 2),), (slice(r, r + 2),)) for r in (0, 2, 4, 6)
    )  # pieces that ranks have whole
    by_pieces = (*halves, QKV[1])
    assert torch.equal(assemble(by_pieces, (12, 3), Shard(0, rank, 2, sections)), torch.cat([Q[rows[0]], K[rows[1]]]))
    inner = slice(3 * rank, 3 * rank + 3)
    expected = torch.cat([GATE[:, inner], UP[:, inner]], 1)
    for layout in (SPLIT, FUSED):
        assert torch.equal(assemble(layout, (2, 12, 3), Shard(1, rank, 2, ((6, 2), (6, 2)))), expected)
    whole = (Piece("fused"),)
    assert torch.equal(assemble(whole, (2, 12, 3), Shard(1, rank, 2, ((6, 2), (6, 2)))), expected)
    assert torch.equal(assemble(whole, (2, 12, 3), Shard(2, 0, 3)), TENSORS["fused"][:, :, :1])
    assert torch.equal(assemble(SPLIT, (2, 12, 3), Shard(0, rank, 2)), TENSORS["fused"][rank : rank + 1])


def test_ranks_share_a_section_that_has_fewer_shares() -> None:
    for rank in range(4):
        found = assemble(QKV, (12, 3), Shard(0, rank, 4, ((8, 4), (4, 2))))
        assert torch.equal(found, torch.cat([Q[2 * rank : 2 * rank + 2], K[rank // 2 * 2 : rank // 2 * 2 + 2]]))


def test_a_whole_weight_takes_its_pieces_as_they_are() -> None:
    assert tuple(Shard().pieces(QKV, (12, 3))) == QKV
    assert torch.equal(assemble(SPLIT, (2, 12, 3), Shard()), TENSORS["fused"])


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="12 rows or columns cannot be divided among 5 ranks"):
        Weight((12, 3), (QKV,), shard=Shard(0, 0, 5))
    with pytest.raises(ValueError, match="4 rows or columns cannot be divided among 3 ranks"):
        list(Shard(0, 0, 3, ((8, 1), (4, 3))).pieces(QKV, (12, 3)))


def test_a_plain_weight_is_its_tensor() -> None:
    weight = Weight.of(Q)
    assert weight.data.data_ptr() == Q.data_ptr() == weight.dense().data_ptr()
    assert (weight.shape, weight.dtype, weight.format, weight.nbytes) == ((8, 3), torch.float32, PLAIN, 8 * 3 * 4)
    assert weight.nbytes == PLAIN.num_bytes((8, 3), "float32") and "[8, 3], plain" in repr(weight)
