"""The model that comes with the package: the default of the command line and of `LLM`.

`demo/` is a model folder like any other; its README.md says how it was made.
"""

import re
from functools import cache
from pathlib import Path

NAME = "anabranch-demo"
"""Its name in the server."""
HELP = "a model folder from Hugging Face or a hub id owner/name (default: the small model that comes with Anabranch)"
"""Help of the argument MODEL."""
PLACE = Path(__file__).parent / "demo"


def folder() -> str:
    if not (PLACE / "config.json").is_file():
        raise ValueError(
            f"no model is named, and the one that comes with Anabranch is missing ({PLACE}); name a folder or a hub id"
            " owner/name, or install Anabranch again"
        )
    return str(PLACE)


@cache
def card(model: str) -> dict[str, str | list[str]]:
    """What the card of the bundled model says it is, and three of the prompts it shows; empty for other models."""
    if Path(model) != PLACE:
        return {}
    text = (PLACE / "README.md").read_text(encoding="utf-8")
    about = re.search(r"^# .+\n\n((?:.+\n)+)", text, re.MULTILINE)
    prompts = re.findall(r"^\*\*(.+)\*\*$", text, re.MULTILINE)
    return {"about": " ".join(about[1].split()) if about else "", "prompts": prompts[:5:2]}
