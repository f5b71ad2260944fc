"""What docs/ show is what is there: the files of the example platform, word for word."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "tests" / "plugin"


def blocks(page: str) -> dict[str, str]:
    """File name → the code block that follows it: a line with the name in bold, then the block."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(r"^\*\*(.+?)\*\*\n\n```\w+\n(.*?)^```$", text, re.M | re.S)
    return {name.replace("\\", ""): code for name, code in found}


def test_the_example_platform_is_the_tested_one() -> None:
    shown = blocks("adding_a_platform.md")
    files = {str(path.relative_to(PLUGIN)) for path in PLUGIN.rglob("*") if path.suffix in (".py", ".toml")}
    assert set(shown) == files
    for name, code in shown.items():
        assert code == (PLUGIN / name).read_text(), name


def test_each_page_ends_with_the_command_that_proves_success() -> None:
    for page in ("platform", "kernel", "model"):
        text = (ROOT / "docs" / f"adding_a_{page}.md").read_text().rstrip()
        last = text.removesuffix("```").rpartition("```sh\n")[2].strip()
        assert text.endswith("```") and last.startswith(("anabranch conformance", "pytest ")), page


def test_what_the_pages_name_exists() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`((?:src|tests)/[a-z\d_./]+)`", page.read_text()):
            made_there = f"**{name}**" in page.read_text()
            assert made_there or (ROOT / name).exists(), f"{page.name}: {name}"
