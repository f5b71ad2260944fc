"""Anabranch: an inference and serving engine for Mixture-of-Experts language models.

Importing this package is cheap on purpose: nothing here imports torch.
"""

import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.llm import LLM, Completion, Grammar, RequestOutput, SamplingParams, TokenLogprobs

# torch's word where numpy is missing, at every start of every process. Nothing but the MLX runner needs it.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")

# torch's threads on a CPU wait in a loop for milliseconds, on cores that kernels in C need: prompts took 1.5 x as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"

__all__ = ["LLM", "Completion", "Grammar", "RequestOutput", "SamplingParams", "TokenLogprobs"]


def __getattr__(name: str) -> Any:
    """What programs use is imported when they first name it."""
    if name in __all__:
        from anabranch import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
