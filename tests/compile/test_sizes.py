"""Padded sizes: every number of rows finds one, and none is much too large."""

import pytest

from anabranch.compile.sizes import common, decode_sizes, fitting, prefill_sizes


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


@pytest.mark.parametrize("largest", [1, 5, 256, 1000])
def test_common_sizes_come_largest_first_and_stand_in_for_all(largest: int) -> None:
    sizes = decode_sizes(largest)
    chosen = common(sizes)
    assert chosen == sorted(chosen, reverse=True) and chosen[0] == largest and set(chosen) <= set(sizes)
    assert all(min(c for c in chosen if c >= size) <= 2 * size for size in sizes)
