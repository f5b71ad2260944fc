"""How a machine does each op fast: one package per provider, files named as in `ops/`.

Importing a provider's package registers its kernels; `bind` imports those a platform asks for.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING

from anabranch import ops

if TYPE_CHECKING:
    from anabranch.platforms import Platform

log = logging.getLogger(__name__)


def bind(platform: Platform) -> None:
    """Register the platform's kernels and choose one for each op. ANABRANCH_KERNELS overrides the choice."""
    for provider, module in platform.providers.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            log.warning("kernels of provider %r are not used: %s", provider, error)
    ops.bind(platform, os.environ.get("ANABRANCH_KERNELS", ""))
