"""Signals between the ranks of a sum through symmetric memory, with a kernel in Python in place of torch's."""

import threading
import time

import pytest
import torch

from anabranch.platforms.symmetric import signal_for_others

NUM_BLOCKS, NUM_SYNCS = 3, 40


def change(pad: torch.Tensor, block: int, rank: int, old: int, new: int, deadline: float) -> None:
    """As soon as the signal is `old`."""
    while pad[block, rank] != old:
        assert time.monotonic() < deadline
        time.sleep(0)
    pad[block, rank] = new


@pytest.mark.parametrize("size, rank", [(2, 0), (2, 1), (4, 2)])
def test_a_kernel_ends_whose_others_are_gone(size: int, rank: int) -> None:
    """Whatever they have left in the pads, and however often it waits."""
    generator = torch.Generator().manual_seed(size + rank)
    pads = [torch.randint(2, (NUM_BLOCKS, size), generator=generator, dtype=torch.int32) for _ in range(size)]
    pads[rank][:, rank] = 0
    deadline, num_done = time.monotonic() + 20, []

    def kernel(block: int, other: int) -> None:
        for _ in range(NUM_SYNCS):
            change(pads[other], block, rank, 0, 1, deadline)
            change(pads[rank], block, other, 1, 0, deadline)
        num_done.append(other)

    threads = [
        threading.Thread(target=kernel, args=(block, other)) for block in range(NUM_BLOCKS) for other in range(size)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        signal_for_others(pads, rank, 1)
        time.sleep(0)
    assert len(num_done) == len(threads)
