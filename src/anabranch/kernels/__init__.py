"""Fast implementations of ops: one package per provider (`triton`, `c`, `torch`, `vendor`), files named as in `ops/`.

`compiling` compiles kernels before their first launch, `tuning` chooses and measures their tiles. Importing a
provider's package registers its kernels; `bind` imports those that a platform names. Importing this package imports
nothing heavy: the process that compiles kernels is started from it before torch is imported.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from anabranch.stages import stage

if TYPE_CHECKING:
    from anabranch.platforms import Platform

log = logging.getLogger(__name__)

COMPILED = "triton"
"""The provider whose kernels are compiled at their first launch."""


INVARIANT = {"invariant": "anabranch.kernels.invariant"}
"""The provider whose kernels compute each row by itself, on a CPU. On GPUs those in Triton do, with fixed tiles."""

ROWS_TOGETHER = (
    *("linear", "linear_heads", "experts", "route", "attention", "latent_attention", "rope_store", "latent_store"),
    *("gated_delta", "gated_delta_drafts", "gated_delta_accept", "logprobs"),
    *("rms_norm", "add_rms_norm", "sum_add_rms_norm", "norm_add"),
)
"""Ops whose other implementations on a GPU, libraries among them, may choose code by the number of rows."""

_deterministic = False


def bind(platform: Platform, deterministic: bool = False) -> None:
    """Register the platform's kernels and choose one for each op. ANABRANCH_KERNELS overrides the choice, unless it
    must be `deterministic`: then what a row gives does not depend on the others, to the bit."""
    from anabranch import ops

    global _deterministic
    providers = dict(platform.providers)
    compiled = COMPILED in providers
    if deterministic and not compiled:
        providers.pop("c", None)  # whose kernels are bound to steps of few rows; `invariant` calls them for all
        providers |= INVARIANT
    for provider, module in providers.items():
        try:
            with stage("import"):
                importlib.import_module(module)
        except ImportError as error:
            if deterministic and provider == COMPILED:
                raise ValueError(
                    f"deterministic: on a GPU it needs Triton, which cannot be imported: {error}"
                ) from None
            log.warning("kernels of provider %r are not used: %s", provider, error)
    launch = sys.modules.get("anabranch.kernels.triton.launch")
    if launch is not None:
        launch.fix_tiles(deterministic and compiled)
    choice = os.environ.get("ANABRANCH_KERNELS", "")
    if deterministic:
        choice = ",".join(f"{name}={COMPILED}" for name in ROWS_TOGETHER) if compiled else ",".join(INVARIANT)
    ops.bind(platform, choice, tuple(providers))
    _deterministic = deterministic


def deterministic_bound() -> bool:
    """Whether ops are bound so that rows do not depend on each other: the last `bind` of the process counts."""
    return _deterministic


def compile_ahead(platform: Platform, work: Callable[[], object]) -> None:
    """Compile what `work` launches, on all cores, instead of one by one at the first launch. `work` is run, but its
    compiled kernels do nothing. Does nothing where no op is bound to a kernel that is compiled."""
    if (missing := c_problem(platform)) and sys.platform == "linux" and not os.environ.get("ANABRANCH_KERNELS"):
        log.warning("%s", missing)
    if COMPILED not in platform.providers or not compiled_kernels_bound():
        return
    if problem := precompile_problem():
        log.warning("each kernel is compiled at its first launch, so first requests are slow: %s", problem)
        return
    from anabranch.kernels.compiling.precompile import precompile, recording

    with recording() as jobs:
        work()
    precompile(jobs)


def precompile_problem() -> str | None:
    """Why kernels cannot be compiled before their first launch with the installed Triton; None if they can."""
    from anabranch.kernels.compiling import versions

    try:
        from anabranch.kernels.compiling import precompile  # noqa: F401
    except ImportError as error:
        return f"it differs from the versions this was written for: {error}"
    return versions.recording_problem()


def c_problem(platform: Platform) -> str:
    """Why kernels in C are not used on a platform that has them; "" if they are."""
    if "c" not in platform.providers:
        return ""
    from anabranch.kernels.c.library import problem

    return problem and f"torch's kernels run instead of those in C, slower in fp32: {problem}"


def compiled_kernels_bound() -> bool:
    """Whether an op is bound to a kernel that is compiled at its first launch."""
    from anabranch import ops

    return any(kernel.provider == COMPILED for op in ops.OPS.values() for kernel in op.bound)


def compiler_facts() -> list[str]:
    """What the installed Triton supports, a line each; empty where it is not used."""
    if not compiled_kernels_bound():
        return []
    from anabranch.kernels.compiling import versions

    gluon, ahead = versions.gluon_problem(), precompile_problem()
    return [
        f"triton    Gluon kernels on Hopper: {f'no, portable ones instead: {gluon}' if gluon else 'yes'}",
        f"          kernels compiled before the first request: {f'no, at first launch: {ahead}' if ahead else 'yes'}\n",
    ]
