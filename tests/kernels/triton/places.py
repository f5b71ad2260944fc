"""Where a Triton kernel can be judged: in the interpreter, or on a GPU.

The interpreter has to be chosen before Triton is imported, so a file's interpreted tests run in a process of their own:
`run_interpreted(__file__)`. bf16 is silently wrong there; a GPU judges it.
"""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

interpreter = pytest.mark.skipif(not INTERPRETED, reason="in test_in_the_interpreter")
compiler = pytest.mark.skipif(INTERPRETED, reason="needs a compiler")
everywhere = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreter), pytest.param("cuda", marks=[pytest.mark.gpu, compiler])]
)


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    few = (torch.float32, torch.float16)
    return few if device == "cpu" else (*few, torch.bfloat16)


def run_interpreted(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
