"""Where a Triton kernel can be judged: in Triton's interpreter on the CPU, or on a GPU.

The interpreter has to be chosen before Triton is imported, so its tests run in a pytest call of their own, with
TRITON_INTERPRET=1 (`make test-interpreter`); `tests/conftest.py` selects them. bf16 is silently wrong there, and Gluon
has no interpreter: those kernels run in tests/kernels/emulation, and a GPU judges them.
"""

import pytest
import torch

interpreter = pytest.mark.interpreter
DEVICES = (pytest.param("cpu", marks=interpreter), pytest.param("cuda", marks=pytest.mark.gpu))
everywhere = pytest.mark.parametrize("device", DEVICES)


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    few = (torch.float32, torch.float16)
    return few if device == "cpu" else (*few, torch.bfloat16)
