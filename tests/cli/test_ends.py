"""How commands end: told to, cut short, unread, or with a mistake in one line."""

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anabranch.cli import main
from anabranch.engine.progress import Bar
from tools import tiny_model

LONG = 120.0  # seconds nothing here takes, on however busy a machine
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""As most people have it: what is printed leaves the process later."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    tiny_model.write(folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    return folder


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Tests that run in the background may have SIGINT ignored, and then what they start ignores it too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "anabranch.cli.main", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=BUFFERED)


class Terminal:
    """A command as a person runs it."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "anabranch.cli.main", *arguments])
        self.text = ""

    def read(self) -> bool:
        """What comes next; False at the end."""
        assert select.select([self.fd], [], [], LONG)[0], self.text
        try:
            some = os.read(self.fd, 65536)
        except OSError:  # how Linux says that the other side has closed
            return False
        self.text += some.decode(errors="replace")
        return bool(some)

    def read_until(self, what: str) -> None:
        since = len(self.text)
        while what not in self.text[since:]:
            assert self.read(), self.text

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def end(self) -> int:
        while self.read():
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_while_generating(model: Path) -> None:
    process = start("generate", str(model), "Once upon", "--max-tokens", "2000", "--ignore-eos")
    assert process.stdout is not None and process.stdout.read(9) == b"Once upon"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LONG)
    assert process.returncode == 130 and said == b"\n"


def test_ctrl_c_while_a_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main.importlib, "import_module", interrupted)
    assert main.main(["bench", "host"]) == 130 and capsys.readouterr().err == "\n"


def test_a_conversation_in_a_terminal(model: Path) -> None:
    chat = Terminal("chat", str(model), "--max-tokens", "1500", "--temperature", "0")
    chat.read_until("you: ")
    assert chat.text == "you: ", "a short start draws no bar and no table"
    chat.type("Hello\n")
    chat.read_until("Hello\r\n")
    assert chat.read()  # into the answer
    chat.type("\x03")
    chat.read_until("you: ")
    chat.type("\x04")
    assert chat.end() == 0 and chat.text.endswith("you: \r\n") and "Traceback" not in chat.text


def test_a_reader_that_leaves_is_no_mistake(model: Path) -> None:
    process = start("plan", str(model))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(LONG) == 141 and process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is(model: Path) -> None:
    command = [sys.executable, "-m", "anabranch.cli.main", "plan", str(model)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LONG, env=BUFFERED)
    assert done.returncode == 1 and "anabranch plan: [Errno 28] No space left" in done.stderr


@pytest.mark.parametrize("words", [["bench"], ["bench", "--help"], ["help", "bench"]])
def test_bench_explains_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(words) == 0
    said = capsys.readouterr().out
    assert "  bench offline  " in said and "  bench host  " in said and "  serve  " not in said


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["help", "generate"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith("usage: anabranch generate [MODEL] PROMPT [options]\n\nWrite a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: anabranch COMMAND"),
        (["--verison"], "no command '--verison'; did you mean '--version'?"),
        (["bench", "sreve"], "no command 'bench sreve'; did you mean 'bench serve'?"),
        (["bench", "--json", "x"], "no command 'bench'"),
        (["bench", "report", "nowhere.json"], "anabranch bench report: nowhere.json: No such file or directory"),
        (["bench", "offline", "nowhere"], "anabranch bench offline: nowhere: no such folder; give"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:1"], "is a server running there? `anabranch serve` starts"),
        (["tune", "./nowhere"], "anabranch tune: ./nowhere: no such folder"),
        (["serve", "./nowhere"], "anabranch serve: ./nowhere: no such folder"),
        (["serve", "--served-model-name", "a", "/"], "has taken /, a folder, for a name: put MODEL before it"),
        (["serve", "--port", "99999"], "anabranch serve: port must lie in [0, 65535], not 99999"),
    ],
)
def test_what_is_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    returned, (out, said) = main.main(words), capsys.readouterr()
    assert message in (said if words else out) and "Traceback" not in said and "listening" not in said
    assert returned == (0 if not words else 2 if "no command" in message else 1)


def test_an_option_that_is_right_is_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    for words, hint in ((["--port", "abc"], False), (["--prot", "1"], True)):
        with pytest.raises(SystemExit) as end:
            main.main(["serve", *words])
        assert end.value.code == 2 and ("did you mean --port?" in capsys.readouterr().err) == hint


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["generate", "Once", "--temp", "1"], "--temperature"),
        (["bench", "serve", "--url", "x"], "--base-url"),
        (["serve", "--max", "1"], ""),
        (["serve", "--enable-prefix-cachin"], ""),  # not --no-prefix-cache
        (["serve", "--n-prefix-cache"], "--no-prefix-cache"),
    ],
)
def test_a_part_of_an_option_names_it(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(words)
    assert (f"did you mean {meant}?" if meant else "lists the options") in (said := capsys.readouterr().err), said
    assert bool(meant) == ("did you mean" in said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU here")
def test_a_platform_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--platform", "cuda"]) == 1
    said = capsys.readouterr()
    assert "platform 'cuda' does not come up on this machine" in said.err and "lists those that do" in said.err
    assert said.out == ""


def test_a_bar_is_for_terminals_and_for_what_takes_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drawn(seconds: float, terminal: bool) -> str:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        bar = Bar("loading weights")
        bar(10**9, 2 * 10**9)
        bar.first -= seconds
        bar(2 * 10**9, 2 * 10**9)
        return capsys.readouterr().err

    assert drawn(0.0, True) == drawn(9.0, False) == ""
    assert "loading weights ████" in drawn(9.0, True)
