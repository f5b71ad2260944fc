"""Decode steps on a CPU whose C kernels are called in one go."""

import pytest
import torch

from anabranch import bundled
from anabranch.kernels.c import library
from anabranch.llm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(bool(library.problem), reason=library.problem)


def test_a_recorded_step_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_PLATFORM", "cpu")
    monkeypatch.delenv("ANABRANCH_KERNELS", raising=False)
    llm = LLM(bundled.folder(), dtype="float32", max_num_seqs=4, num_pages=64, prefix_cache=False)
    runner = llm.engine.runner
    prompts = [[5, 6, 7], [300, 20, 1000, 9, 40], [77] * 20]
    # Requests end one after another, so that steps have 3, 2 and 1 rows; pages change on the way.
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (8, 24, 40)]
    recorded = [output.token_ids for output in llm.generate(prompts, params)]
    assert sorted(runner.forward.recorded.by_rows) == [1, 2, 3]  # type: ignore[attr-defined]
    monkeypatch.setattr(runner.forward, "recorded", None)
    assert [output.token_ids for output in llm.generate(prompts, params)] == recorded
    alone = [llm.generate([prompt], [one])[0].token_ids for prompt, one in zip(prompts, params, strict=True)]
    assert alone == recorded


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("inputs", [5, 16, 100, 112, 256])
def test_rows_of_a_product_do_not_depend_on_other_rows(inputs: int, bf16: bool) -> None:
    """Kernels have tiles of their own for one row, for two and for more, and rows of a matrix are left over."""
    compute, outputs = library.function("linear"), 301
    x_TD, bias_F = torch.randn(11, inputs), torch.randn(outputs)
    weight_FD = torch.randn(outputs, inputs).to(torch.bfloat16 if bf16 else torch.float32)

    def linear(x: torch.Tensor, threads: int) -> torch.Tensor:
        y = torch.full((x.shape[0], outputs), torch.nan)
        pointers = [tensor.data_ptr() for tensor in (y, x, weight_FD, bias_F)]
        compute(*pointers, x.shape[0], outputs, inputs, bf16, threads)
        return y

    alone = torch.cat([linear(x, 1) for x in x_TD.split(1)])
    for rows in (2, 3, 4, 5, 11):
        assert torch.equal(torch.cat([linear(x, 3) for x in x_TD.split(rows)]), alone), rows
    torch.testing.assert_close(alone, x_TD @ weight_FD.float().T + bias_F, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dim", [24, 64])
def test_scores_of_heads_do_not_depend_on_other_heads(heads: int, dim: int) -> None:
    """Heads that share a key are computed a few at a time, and their keys too."""
    compute, page, lengths = library.function("attention"), 4, torch.tensor([1, 7, 30], dtype=torch.int32)
    pages = torch.randperm(24).int().view(3, 8)
    q, (k, v) = torch.randn(3, heads, dim), torch.randn(2, 24, page, 1, dim)

    def attention(q: torch.Tensor, window: int) -> torch.Tensor:
        out, heads = torch.full_like(q, torch.nan), q.shape[1]
        pointers = [tensor.data_ptr() for tensor in (out, q, k, v, pages, lengths)]
        sizes = [3, heads, 1, dim, dim, page, 8, heads * dim, window]
        compute(*pointers, None, *sizes, dim**-0.5, 1.0, 2)
        return out

    for window in (0, 5):
        together = attention(q, window)
        assert torch.equal(together, torch.cat([attention(one.contiguous(), window) for one in q.split(1, 1)], 1))
        for r, length in enumerate(lengths.tolist()):
            first = max(0, length - window) if window else 0
            keys, values = (x[pages[r].long()].reshape(-1, dim)[first:length] for x in (k, v))
            weight = torch.softmax(q[r] @ keys.T * dim**-0.5, -1)
            torch.testing.assert_close(together[r], weight @ values)
