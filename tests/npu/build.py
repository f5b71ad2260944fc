"""Build the stub runtime (runtime.c) under the names of the libraries that torch_npu links: `make test-npu` does.

python tests/npu/build.py FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RUNTIME = "ascendcl"
OTHERS = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
"""Empty: whoever looks something up in them finds it in the runtime, which they link."""


def build(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("runtime.c")
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-std=gnu11", "-w"]
    names = {name: f"lib{name}.so" for name in (RUNTIME, *OTHERS)}
    runtime = [*command, str(source)]
    other = [*command, "-x", "c", "/dev/null", "-x", "none", "-Wl,--no-as-needed", f"-L{folder}", f"-l{RUNTIME}"]
    for name, file in names.items():
        sources = runtime if name == RUNTIME else other
        subprocess.run([*sources, f"-Wl,-soname,{file}", "-o", str(folder / file)], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
