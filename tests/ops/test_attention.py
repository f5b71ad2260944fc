"""Paged attention against torch's on dense tensors. Whatever lies in pages that a query must not see is NaN here."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from anabranch import ops
from anabranch.ops import AttentionCall

PAGE_SIZE, DIM = 4, 8


@dataclass
class Request:
    """Its last `len(q)` tokens are this step's queries."""

    q_QHD: torch.Tensor
    k_LGD: torch.Tensor
    v_LGD: torch.Tensor

    @classmethod
    def draw(cls, queries: int, length: int, heads: int, kv_heads: int) -> "Request":
        k, v = torch.randn(2, length, kv_heads, DIM)
        return cls(torch.randn(queries, heads, DIM), k, v)

    def dense(self, window: int) -> torch.Tensor:
        queries, length = self.q_QHD.shape[0], self.k_LGD.shape[0]
        distance = torch.arange(length - queries, length)[:, None] - torch.arange(length)
        visible = distance >= 0
        if window:
            visible &= distance < window
        q, k, v = (x.transpose(0, 1) for x in (self.q_QHD, self.k_LGD, self.v_LGD))
        return F.scaled_dot_product_attention(q, k, v, visible, scale=0.3, enable_gqa=True).transpose(0, 1)


def paged(requests: list[Request], window: int, padding: int = 0) -> torch.Tensor:
    num_pages = 40
    free = torch.randperm(num_pages).tolist()
    kv_heads = requests[0].k_LGD.shape[1]
    k_PSGD, v_PSGD = torch.full((2, num_pages, PAGE_SIZE, kv_heads, DIM), float("nan"))
    page_table_RM = torch.full((len(requests), 8), 10**6, dtype=torch.int32)  # no such page
    start = [0]
    for r, request in enumerate(requests):
        queries, length = request.q_QHD.shape[0], request.k_LGD.shape[0]
        start.append(start[-1] + queries)
        first_seen = max(0, length - queries - window + 1) if window else 0
        for position in range(first_seen, length):
            column, slot = divmod(position, PAGE_SIZE)
            if page_table_RM[r, column] == 10**6:
                page_table_RM[r, column] = free.pop()
            page = page_table_RM[r, column]
            k_PSGD[page, slot], v_PSGD[page, slot] = request.k_LGD[position], request.v_LGD[position]
    q_THD = torch.cat([request.q_QHD for request in requests])
    q_THD = torch.cat([q_THD, torch.full((padding, *q_THD.shape[1:]), float("nan"))])
    lengths = torch.tensor([request.k_LGD.shape[0] for request in requests], dtype=torch.int32)
    starts = torch.tensor(start, dtype=torch.int32)
    return ops.attention.reference(AttentionCall(q_THD, k_PSGD, v_PSGD, page_table_RM, starts, lengths, 0.3, window))


# (queries, context length): prefill, chunk, decode, a decode that starts a page, nothing.
SHAPES = [(9, 9), (3, 11), (1, 14), (1, 5), (0, 6), (1, 1), (4, 24)]


@pytest.mark.parametrize("window", [0, 1, 3, 4, 7, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_as_torch_does_it_on_dense_tensors(window: int, heads: int, kv_heads: int) -> None:
    requests = [Request.draw(queries, length, heads, kv_heads) for queries, length in SHAPES]
    expected = torch.cat([request.dense(window) for request in requests])
    torch.testing.assert_close(paged(requests, window), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [0, 5])
def test_batched_is_alone(window: int) -> None:
    requests = [Request.draw(queries, length, 4, 2) for queries, length in SHAPES]
    alone = torch.cat([paged([request], window) for request in requests])
    torch.testing.assert_close(paged(requests, window), alone, rtol=1e-6, atol=1e-6)


def test_padding_rows_are_zero() -> None:
    requests = [Request.draw(2, 6, 2, 1)]
    out_THD = paged(requests, window=0, padding=3)
    assert torch.equal(out_THD[2:], torch.zeros(3, 2, DIM))
    torch.testing.assert_close(out_THD[:2], requests[0].dense(0))


def test_a_window_counts_the_query_itself_as_transformers_does() -> None:
    from transformers.masking_utils import sliding_window_causal_mask_function

    mask = sliding_window_causal_mask_function(3)
    seen = [key for key in range(8) if mask(0, 0, torch.tensor(5), torch.tensor(key))]
    request = Request.draw(1, 6, 1, 1)
    inside = Request(request.q_QHD, request.k_LGD[seen], request.v_LGD[seen])
    torch.testing.assert_close(paged([request], window=3), inside.dense(0))
