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


def test_rows_of_a_product_do_not_depend_on_other_rows() -> None:
    compute = library.function("linear")
    x_TD, weight_FD, bias_F = torch.randn(11, 100), torch.randn(301, 100), torch.randn(301)

    def linear(x: torch.Tensor, threads: int) -> torch.Tensor:
        y = torch.empty(x.shape[0], 301)
        pointers = [tensor.data_ptr() for tensor in (y, x, weight_FD, bias_F)]
        compute(*pointers, x.shape[0], 301, 100, False, threads)
        return y

    together = linear(x_TD, 3)
    assert torch.equal(together, torch.cat([linear(x, 1) for x in x_TD.split(1)]))
    torch.testing.assert_close(together, x_TD @ weight_FD.T + bias_F)
