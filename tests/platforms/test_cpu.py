"""What is the CPU platform's alone."""

import torch

from anabranch.platforms.cpu import FEW_PRODUCTS, CpuPlatform


def test_small_steps_are_left_to_one_thread() -> None:
    platform, before = CpuPlatform(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with platform.step(FEW_PRODUCTS - 1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with platform.step(FEW_PRODUCTS):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
