"""Names of Gluon that differ between the Triton versions supported here (3.6 to 3.9).

Imported only by kernels written in Gluon.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Waits for all threads of a partition and makes their shared memory writes visible. Called `thread_barrier` in 3.6."""
# 3.6 and 3.7 have the longer name of these two only, 3.9 the shorter one only.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Starts a copy of one block by the copy engine."""
thread_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""Starts a copy of a block by the threads themselves, 16 bytes at a time."""
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Shared memory seen with another shape: the name of that begins with an underscore in 3.6 and 3.7."""
