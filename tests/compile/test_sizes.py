"""Padded sizes: every number of rows finds one, and none is much too large."""

from itertools import pairwise

import pytest

from anabranch.compile.sizes import common_decode, common_prefill, decode_sizes, fitting, prefill_sizes, prompt_sizes


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 16, 17, 100, 256, 300, 1024])
@pytest.mark.parametrize("make", [decode_sizes, prefill_sizes])
def test_every_number_of_rows_fits_closely(make, largest: int) -> None:
    sizes = make(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    for num_rows in range(1, largest + 1):
        size = fitting(sizes, num_rows)
        assert size is not None and num_rows <= size <= largest
        if num_rows >= 64:
            assert size - num_rows <= size // (8 if make is decode_sizes else 4)
    assert fitting(sizes, largest + 1) is None


@pytest.mark.parametrize("largest", [1, 5, 256, 1000, 4096])
@pytest.mark.parametrize(("make", "common"), [(decode_sizes, common_decode), (prefill_sizes, common_prefill)])
def test_common_sizes_come_largest_first_and_stand_in_for_all(make, common, largest: int) -> None:
    sizes = make(largest)
    chosen = common(sizes)
    assert chosen == sorted(chosen, reverse=True) and chosen[0] == largest and set(chosen) <= set(sizes)
    assert len(chosen) <= 20
    for size in sizes:
        stand_in = min(c for c in chosen if c >= size)
        assert stand_in <= 2 * size
        if size >= 512:
            assert stand_in <= 1.6 * size


def test_what_is_captured_before_the_first_request() -> None:
    """Each takes a tenth of a second or two, and everybody waits for it."""
    assert common_decode(decode_sizes(512)) == [512, 384, 256, 192, 128, 64, 32, 16, 8, 4, 2, 1]
    assert common_prefill(prefill_sizes(2048)) == [2048, 1536, 1024, 768, 512, 256, 128, 64, 32, 16]


@pytest.mark.parametrize("largest", [2, 16, 100, 2048, 3000, 8192, 10_000])
def test_prompts_have_the_sizes_of_other_steps_and_a_few_large_ones(largest: int) -> None:
    sizes = prompt_sizes(2048, largest)
    small = prefill_sizes(min(2048, largest))
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest and sizes[: len(small)] == small
    assert all(after <= 2 * before for before, after in pairwise(sizes[len(small) - 1 :]))
    assert prompt_sizes(2048, 8192)[-3:] == [2048, 4096, 8192]
