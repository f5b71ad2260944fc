"""Compiling kernels before their first launch. Knows Triton and processes, but not which kernels there are."""
