"""The scripts that complete words: bash runs its own, the others are held against the options that there are."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from anabranch.cli.completion import visible
from anabranch.cli.main import COMMANDS, main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(code: str, *words: str) -> list[str]:
    array = " ".join(f"'{word}'" for word in words)
    code += f"\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _anabranch; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    code = script("bash", capsys)
    assert completed(code, "anabranch", "") == list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    assert completed(code, "anabranch", "bench", "s") == ["serve", "step"]
    assert completed(code, "anabranch", "serve", "--max-num-b") == ["--max-num-batched-tokens"]
    assert completed(code, "anabranch", "bench", "serve", "--num-p") == ["--num-prompts"]
    assert completed(code, "anabranch", "serve", "x", "--dtype", "f") == ["float32", "float16"]
    assert completed(code, "anabranch", "completion", "z") == ["zsh"]
    assert completed(code, "anabranch", "serve", "x") == []  # bash then completes files
    for name in COMMANDS:
        options = [option for action in visible(name) for option in action.option_strings]
        assert completed(code, "anabranch", *name.split(), "-") == options


def test_zsh_uses_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = script("zsh", capsys)
    assert code.partition("\n")[2] == script("bash", capsys) and "bashcompinit" in code.partition("\n")[0]
    if shutil.which("zsh"):
        (tmp_path / "a.zsh").write_text(code)
        assert subprocess.run(["zsh", "-f", str(tmp_path / "a.zsh")], capture_output=True).returncode == 0


def test_fish_has_every_option(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = script("fish", capsys)
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        lines = [line for line in code.splitlines() if f"from {second or first}'" in line]
        lines = [line for line in lines if bool(second) == ("-n 'not" not in line)]
        found = {word for line in lines for word in re.findall(r"' -[ls] '([^']+)'", line)}
        assert found == {option.lstrip("-") for action in visible(name) for option in action.option_strings}, name
    if shutil.which("fish"):
        (tmp_path / "a.fish").write_text(code)
        assert subprocess.run(["fish", "--no-execute", str(tmp_path / "a.fish")], capture_output=True).returncode == 0
