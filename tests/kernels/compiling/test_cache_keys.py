"""Every process has the same name for a kernel, whatever it hashed before."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from anabranch.kernels.triton import sample_search
from tests.engine.paper_h200 import all_kernels

ROOT = Path(__file__).parents[3]
NAMES = """
import json, os, sys
from tests.engine.paper_h200 import all_kernels
kernels = all_kernels()
names = []
for kernel in kernels:  # each as if it were the first
    source, target = os.pipe()
    if not os.fork():
        os.write(target, kernel.cache_key.encode())
        os._exit(0)
    os.wait()
    names.append(os.read(source, 1000).decode())
    os.close(source), os.close(target)
backwards = [kernel.cache_key for kernel in reversed(kernels)][::-1]
print(json.dumps([names, backwards]))
"""


@pytest.mark.slow
def test_a_name_does_not_depend_on_what_was_hashed_before() -> None:
    kernels = all_kernels()
    here = [kernel.cache_key for kernel in kernels]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for there in json.loads(done.stdout):
        unlike = [kernel.__name__ for kernel, a, b in zip(kernels, here, there, strict=True) if a != b]
        assert not unlike, unlike


CHANGED = """
import sys
import triton.language as tl
from anabranch.kernels.triton import sample_search
sample_search.LOWEST = tl.constexpr(sample_search.LOWEST.value * int(sys.argv[1]))
print(sample_search.kth_largest.cache_key)
assert not sample_search.kth_largest.used_global_vals, "it has none of its own, and every launch looks at each"
"""


@pytest.mark.slow
def test_constants_of_called_functions_count() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    found = [
        subprocess.run([sys.executable, "-c", CHANGED, factor], capture_output=True, text=True, env=environment)
        for factor in ("1", "2")
    ]
    assert all(one.returncode == 0 for one in found), found
    assert found[0].stdout.strip() == sample_search.kth_largest.cache_key != found[1].stdout.strip()


def test_no_two_constants_share_a_name() -> None:
    """Triton hashes them in the order of their names, and of addresses where those are equal."""
    for kernel in all_kernels():
        _ = kernel.cache_key
        found: dict[str, Any] = {}
        for (name, _), (value, _) in kernel.used_global_vals.items():
            assert found.setdefault(name, value) == value, f"{kernel.__name__}: {name}"
