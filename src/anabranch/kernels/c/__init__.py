"""Kernels in C for decode steps on a CPU: each replaces several small calls of torch. fp32, few rows; with
`deterministic` any number (`kernels/invariant/in_c`), because a row's sums have the same order in all of them.

They are compiled when this is imported for the first time on a machine. Where that is not possible nothing is
registered, and torch's kernels remain (`kernels.c_problem`).
"""

from anabranch.kernels.c.library import problem

if not problem:
    from anabranch.kernels.c import activation, attention, experts, linear, norm, rope_store, route

    __all__ = ["activation", "attention", "experts", "linear", "norm", "rope_store", "route"]
