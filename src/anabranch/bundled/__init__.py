"""The model that comes with the package: what the command line uses when nobody names one.

`demo/` is a model folder like any other, and its README.md says how it was made. This file knows where it is, not what
is in it.
"""

from __future__ import annotations

from pathlib import Path

NAME = "anabranch-demo"
"""What the server calls it."""
HELP = "a folder as Hugging Face lays it out, or a hub id owner/name; default: the model that comes with Anabranch"
"""Of an option MODEL."""
PLACE = Path(__file__).parent / "demo"


def folder() -> str:
    if not (PLACE / "config.json").is_file():
        raise ValueError(
            f"no model is named, and the one that comes with Anabranch is missing ({PLACE}); name a folder or a hub id"
            " owner/name, or install Anabranch again"
        )
    return str(PLACE)
