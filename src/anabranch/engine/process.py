"""Starts the engine's process, passes its stderr on and reports its exit. Makes and removes the folder of its sockets.

Knows nothing of messages.
"""

import codecs
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

import anabranch

FLUSH_SECONDS = 0.1  # for what a process wrote just before it ended to arrive
STDERR_LINES = 20
STDERR_KEPT = 8192  # characters


class EngineProcess:
    """The worker's process: its folder of sockets, its stderr (passed on, the end of it kept), its exit code.

    Start it from a thread that lives longer: Linux ends it with the thread that started it (see processes.die_with).
    """

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        self.folder = socket_folder()
        packages = [str(Path(anabranch.__file__).parents[1]), *filter(None, sys.path)]
        # -P and the same path as ours: it imports what we would, and nothing from the current folder.
        command = [sys.executable, "-P", "-m", "anabranch.engine.worker", str(self.folder), str(os.getpid())]
        try:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(packages)},
                process_group=0,  # no Ctrl-C of a terminal; its children can be killed with it
            )
        except BaseException:
            self.remove_folder()
            raise
        self.on_exit = on_exit
        self.stderr_end = ""
        self.reader = threading.Thread(target=self._read, name="engine-stderr", daemon=True)
        self.reader.start()
        threading.Thread(target=self._wait, name="engine-exit", daemon=True).start()

    @property
    def last_lines(self) -> list[str]:
        return self.stderr_end.splitlines()[-STDERR_LINES:]

    @property
    def pid(self) -> int:
        return self.popen.pid

    def _read(self) -> None:
        stdout = self.popen.stdout
        assert isinstance(stdout, io.BufferedReader)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := stdout.read1(STDERR_KEPT):  # not lines: a progress bar has none
            text = decoder.decode(chunk)
            self.stderr_end = (self.stderr_end + text)[-STDERR_KEPT:]
            with contextlib.suppress(OSError, ValueError):  # our own stderr may be closed
                sys.stderr.write(text)
                sys.stderr.flush()
        stdout.close()

    def _wait(self) -> None:
        if hasattr(os, "waitid"):  # kill its children while the group's number cannot be reused
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.kill()
        code = self.popen.wait()
        self.reader.join(FLUSH_SECONDS)
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.on_exit(code)

    def kill(self) -> None:
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def socket_folder() -> Path:
    """A private folder (mode 0700) with a path short enough for names of sockets."""
    folder = Path(tempfile.mkdtemp(prefix="anabranch-"))
    if len(os.fsencode(folder / "commands")) > zmq.IPC_PATH_MAX_LEN:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="anabranch-", dir="/tmp"))
    return folder
