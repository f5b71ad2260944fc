"""What a platform must show before its answers are believed: `anabranch conformance --platform NAME`.

Every op × kernel × sample, a tiny model of each family, and the contract of streams, copies and captured graphs; the
CPU's references are the judge. It needs no files and no library but torch: whoever brings a platform can run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from anabranch.conformance.contract import check_contract
from anabranch.conformance.models import check_models
from anabranch.conformance.ops import check_ops
from anabranch.conformance.result import Result
from anabranch.platforms import Platform

__all__ = ["SECTIONS", "Result", "conformance"]

SECTIONS: dict[str, Callable[[Platform], Iterator[Result]]] = {
    "contract": check_contract,
    "ops": check_ops,
    "models": check_models,
}


def conformance(platform: Platform, sections: Sequence[str] = tuple(SECTIONS)) -> Iterator[Result]:
    for section in sections:
        yield from SECTIONS[section](platform)
