"""Kernels compiled elsewhere are those that a launch looks for. Without a GPU: a driver that only names its target."""

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from anabranch.kernels.compiling import compile_server, precompile  # noqa: E402
from anabranch.kernels.triton import experts_hopper, experts_plan, experts_sum  # noqa: E402
from tests.kernels.triton.ahead_of_time import NoDevice  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")

ROOT = Path(__file__).parents[3]
KERNELS = (experts_sum.sum_rows, experts_plan.count_pairs, experts_hopper.gate_up_hopper)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    yield
    compile_server.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a driver without a device, for this test alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "_active", NoDevice())
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    return tmp_path / "cache"


def launch(columns: int, width: int = 2048, **options: Any) -> None:
    """`sum_rows` as the experts launch it."""
    rows_TKD = torch.empty(3, 8, width, dtype=torch.bfloat16)
    experts_sum.sum_rows[(3, 1)](
        torch.empty(3, 8, dtype=torch.int32),
        rows_TKD,
        rows_TKD[:, 0].contiguous(),
        width,
        K=8,
        KP=options.pop("KP", 8),
        COLUMNS=columns,
        FIRST=False,
        DEPENDENT=True,
        launch_pdl=True,
        **options,
    )


def record(*columns: int, **options: Any) -> list[precompile.Job]:
    with precompile.recording() as jobs:
        for number in columns:
            launch(number, **options)
    return jobs


def test_recording_compiles_and_launches_nothing(cache: Path) -> None:
    before = JITFunction.run, JITFunction._do_compile
    with precompile.recording() as jobs:
        launch(256)
        launch(256)  # the same kernel
        launch(256, width=1000)  # not a multiple of 16: another one
        launch(256, num_warps=8)
        token = torch.empty(5, dtype=torch.int64).new_empty(7)
        assert torch.ones(9)[token].sum() == 7, "fresh memory is a valid index"
    assert (JITFunction.run, JITFunction._do_compile) == before
    assert not cache.exists()
    assert [job.options["num_warps"] for job in jobs] == [4, 4, 8]
    assert all(job.options["launch_pdl"] for job in jobs)
    assert len({job.hash() for job in jobs}) == 3
    assert jobs[0].name == ("sum_rows(K=8, KP=8, COLUMNS=256, FIRST=False, DEPENDENT=True, num_warps=4, num_stages=3)")


def test_recording_is_undone_after_a_failure(cache: Path) -> None:
    before = JITFunction.run, JITFunction._do_compile
    with pytest.raises(KeyError), precompile.recording():
        launch(256, nonsense=1)
    assert (JITFunction.run, JITFunction._do_compile) == before


LATER = """
import sys, json
from collections import defaultdict
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from tests.kernels.triton.ahead_of_time import NoDevice
from tests.kernels.compiling.test_precompile import launch
driver.set_active(NoDevice())
hits = []
knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])
run = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs)
for columns in (16, 32, 64, 128, 256):
    launch(columns)
print(json.dumps(hits))
"""


@pytest.mark.slow
def test_a_later_process_finds_what_was_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way of a launch but for the launch itself, in a process that has never seen the jobs."""
    jobs = record(16, 32, 64, 128)
    assert not any(job.is_cached() for job in jobs)
    assert precompile.precompile(jobs, workers=2) == []
    assert all(job.is_cached() for job in jobs)
    assert len(list(cache.glob("*/sum_rows.cubin"))) == 4
    # Nothing is left to do, and no process is started.
    with monkeypatch.context() as patch:
        patch.setattr(compile_server, "start", lambda: pytest.fail("asked for a server"))
        assert precompile.precompile(jobs) == []

    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, True, True, True, False]  # the last was not compiled before


def test_gluon_kernels_too(cache: Path) -> None:
    """A signature with layouts in it, and options that Triton's hooks do not show."""
    weight_EFD = torch.empty(2, 256, 128, dtype=torch.bfloat16)
    x_TD, rows = torch.empty(8, 128, dtype=torch.bfloat16), torch.empty(64, dtype=torch.int32)
    with precompile.recording() as jobs:
        experts_hopper.gate_up_hopper[(1,)](
            x_TD,
            x_TD.stride(0),
            experts_hopper.descriptor(weight_EFD, 64, 64),
            torch.empty(16, 128, dtype=torch.bfloat16),
            rows,
            rows,
            rows,
            1,
            128,
            K=2,
            DEPTH=128,
            NARROW=False,
            ACTIVATION="silu",
            BN=64,
            BK=64,
            STAGES=2,
            BAND=1,
            GROUPS=1,
            SLABS=1,
            EXTRA=0,
            num_warps=4,
            launch_pdl=True,
            maxnreg=128,
        )
    assert len(jobs) == 1 and jobs[0].options["maxnreg"] == 128
    compile_server.start()  # else one job is done here
    assert precompile.precompile(jobs) == []
    assert jobs[0].is_cached() and list(cache.glob("*/gate_up_hopper.cubin"))


class Bomb:
    """A constant that ends whoever reads it."""

    def __reduce__(self) -> Any:
        return os.abort, ()

    def __str__(self) -> str:
        return "boom"


def test_failures_are_named_and_the_rest_is_compiled(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, wrong = record(16), record(32, KP=3)  # a range of 3 is none of Triton's
    bomb = [replace(job, constants={**job.constants, (5,): Bomb()}) for job in good]
    compile_server.start()
    failed = precompile.precompile([*bomb, *wrong, *good], workers=1)
    assert sorted(failed) == sorted([wrong[0].name, bomb[0].name])
    assert good[0].is_cached() and not wrong[0].is_cached()
    assert "arange's range must be a power of 2" in caplog.text and "the compiler was ended by SIGABRT" in caplog.text


def test_a_kernel_that_a_launch_would_not_find_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = record(16, 32, 64, 128)
    monkeypatch.setattr(experts_sum.sum_rows, "hash", "of another text")
    assert sorted(precompile.precompile(jobs)) == sorted(job.name for job in jobs)
    assert len(list(cache.glob("*/sum_rows.cubin"))) == 4


def test_a_kernel_that_has_no_name_elsewhere_is_compiled_here(cache: Path) -> None:
    @triton.jit
    def local(x, N: tl.constexpr):
        tl.store(x + tl.arange(0, N), 1.0)

    with torch.inference_mode():  # as warm-ups are
        with precompile.recording() as jobs:
            local[(1,)](torch.empty(16), N=16)
    (local_job,) = jobs
    compile_server.start()
    assert precompile.precompile([local_job, *record(16)]) == []
    assert local_job.is_cached() and list(cache.glob("*/local.cubin"))


def test_a_few_are_compiled_here(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    compile_server.close()
    jobs = record(16) + record(32, KP=3)
    assert precompile.precompile(jobs) == [jobs[1].name]
    assert not compile_server.running()
    assert jobs[0].is_cached() and "CompilationError" in caplog.text
    assert precompile.precompile(record(64), deadline=0) == [record(64)[0].name]
    assert "out of time" in caplog.text


def test_a_deadline_gives_a_batch_up_and_the_next_is_compiled(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    jobs = record(16, 32, 64, 128)
    server = compile_server.start()
    assert sorted(precompile.precompile(jobs, deadline=0)) == sorted(job.name for job in jobs)
    assert "out of time" in caplog.text
    more = record(256, 512)
    assert precompile.precompile(more) == [] and all(job.is_cached() for job in more)
    assert compile_server.start() is server


def test_a_broken_server_fails_its_jobs_and_is_replaced(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    jobs = record(16, 32, 64, 128)
    server = compile_server.start()
    # Stopped, it is alive to whoever asks; it dies when the jobs are on their way.
    os.kill(server._process.pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (server._process.pid, signal.SIGKILL)).start()
    assert sorted(precompile.precompile(jobs)) == sorted(job.name for job in jobs)
    assert "the compiling process ended with exit code -9" in caplog.text
    assert precompile.precompile(jobs) == []
    assert compile_server.running() and compile_server.start() is not server


def test_the_server_goes_with_its_program() -> None:
    code = (
        "import os; from anabranch.kernels.compiling import compile_server; "
        "print(compile_server.start()._process.pid, flush=True); os._exit(1)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    process = int(done.stdout)
    until = time.monotonic() + 120
    while is_running(process) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(process)


def is_running(process: int) -> bool:
    """A zombie has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.compiler
def test_launchers_are_compiled_too(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C around a kernel, with a libcuda to link against that has nothing in it."""
    from triton.backends.nvidia.driver import CudaLauncher

    if "compile_module_from_src" not in inspect.getsource(CudaLauncher):
        pytest.skip("this Triton has one launcher for all kernels: nothing to compile for each")
    (tmp_path / "empty.c").write_text("int nothing;")
    command = ["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "empty.c")]
    subprocess.run(command, check=True)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setattr(driver.active, "launcher_cls", CudaLauncher, raising=False)
    compile_server.start()
    assert precompile.precompile(record(16)) == []
    assert list(cache.glob("*/__triton_launcher*.so"))


@pytest.mark.parametrize(
    ("device", "environment", "filled", "started"),
    [
        (True, {}, False, True),
        (False, {}, False, False),
        (True, {}, True, False),
        (True, {"ANABRANCH_PLATFORM": "cpu"}, False, False),
        (True, {"TRITON_INTERPRET": "1"}, False, False),
    ],
)
def test_it_starts_early_on_a_first_start_only(
    device: bool,
    environment: dict[str, str],
    filled: bool,
    started: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ANABRANCH_PLATFORM", raising=False)
    for name, value in {"TRITON_CACHE_DIR": str(tmp_path / "cache"), **environment}.items():
        monkeypatch.setenv(name, value)
    if filled:
        (tmp_path / "cache" / "KERNEL").mkdir(parents=True)
    (tmp_path / "device").touch()
    monkeypatch.setattr(compile_server, "DEVICE_FILES", (str(tmp_path / ("device" if device else "none")),))
    monkeypatch.setattr(compile_server, "_server", None)
    calls: list[None] = []
    monkeypatch.setattr(compile_server, "start", lambda: calls.append(None))
    assert compile_server.start_early() == started == bool(calls)


def test_asking_for_the_server_imports_no_torch() -> None:
    code = "import sys; from anabranch.kernels.compiling import compile_server; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


ON_A_GPU = """
import torch
from triton import knobs
from anabranch.kernels.compiling import compile_server
from anabranch.kernels.triton import experts
from anabranch.kernels.compiling.precompile import precompile, recording
from anabranch.ops import experts as op
from anabranch.ops.arguments import map_tensors
torch.manual_seed(0)
calls = [sample for label, sample in op.samples(torch.bfloat16, torch.Generator("cpu").manual_seed(0))][:4]
calls = [map_tensors(torch.Tensor.cuda, call) for call in calls]
calls = [call for call in calls if experts.accepts(**call)]
assert calls
with recording() as jobs:
    for call in calls:
        experts.experts(**call)
assert jobs
assert precompile(jobs) == []
hits = []
knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])
for call in calls:
    found, expected = experts.experts(**call).float(), op.reference(**call).float()
    assert (found - expected).norm() <= 1e-2 * expected.norm()
assert hits and all(hits), hits
compile_server.close()
"""


@pytest.mark.gpu
def test_launches_on_a_gpu_find_every_kernel(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
