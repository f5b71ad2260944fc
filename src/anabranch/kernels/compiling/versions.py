"""What the installed Triton version supports beyond plain kernels: Gluon, and compilation before the first launch.

Both use parts of Triton that change between releases. A version without them falls back: to portable kernels, and to
compilation at the first launch. `anabranch doctor` prints what applies.
"""

import triton

GLUON = ("3.6", "3.7", "3.8", "3.9")
"""Triton versions for which every Gluon kernel compiles (tests/kernels/compiling/test_versions.py)."""


def gluon_problem() -> str | None:
    """Why Gluon kernels are not used with this Triton; None if they are."""
    if ".".join(triton.__version__.split(".")[:2]) in GLUON:
        return None
    return f"Gluon kernels are written for Triton {', '.join(GLUON)}, not {triton.__version__}"


def precompile_problem() -> str | None:
    """Why kernels cannot be compiled before their first launch with this Triton; None if they can."""
    try:
        from anabranch.kernels.compiling import precompile
    except ImportError as error:
        return f"Triton {triton.__version__} differs from the versions this was written for: {error}"
    return precompile.problem()
