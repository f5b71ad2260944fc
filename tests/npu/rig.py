"""torch_npu over the stub runtime, in a process that was started for it: `make test-npu`.

A test file that needs it begins with `from tests.npu import rig` and `rig.needed()`.
"""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

FOLDER = os.environ.get("ANABRANCH_NPU_STUB")
"""Where the stub's libraries are, which must be on LD_LIBRARY_PATH too: the linker reads that when a process starts."""


def needed() -> None:
    """Skip this file where nobody has set the stub up; fail where somebody has and torch_npu does not come up."""
    if FOLDER is None:
        pytest.skip("needs an environment of its own: make test-npu", allow_module_level=True)
    import torch_npu

    assert torch.npu.is_available(), torch_npu.__file__


class Runtime:
    """What the runtime was asked, in order."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libascendcl.so")  # the one that torch_npu has loaded
        self.library.stub_log.restype = ctypes.c_char_p
        self.library.stub_number.argtypes = [ctypes.c_void_p]

    def record(self) -> None:
        """Begin anew."""
        self.library.stub_record()

    def log(self) -> list[str]:
        """What was asked since; nothing more is written down."""
        return self.library.stub_log().decode().splitlines()

    def note(self, line: str) -> None:
        self.library.stub_note(line.encode())

    def stream(self) -> int:
        """The number of the current stream."""
        return self.library.stub_number(torch.npu.current_stream().npu_stream)
