"""An H200 on paper: a runner whose tensors have no memory, and whose kernels are named instead of launched.

    with paper_h200():
        runner = make_runner("qwen3-30b-a3b", folder)
        ...

Kernels are specialised by Triton itself, for the target and by the arguments that an H200 would see: a tensor without
memory gives the offset of its view as its address, and a GPU's allocator aligns all storage. Nothing is compiled.
"""

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import anabranch.kernels.triton as package
from anabranch import ops
from anabranch.bench import offline
from anabranch.config import EngineConfig
from anabranch.engine.sampler import Sampler
from anabranch.engine.sampling_plan import Logprobs
from anabranch.engine.torch_runner import TorchRunner
from anabranch.kernels.compiling import precompile
from anabranch.kernels.compiling.precompile import Job
from anabranch.kernels.triton import attention, experts, latent_attention, linear, linear_quantized
from anabranch.kernels.tuning import experts_tables, experts_tiles
from anabranch.kernels.tuning import table as tables
from anabranch.loader import load
from anabranch.loader.resolve import resolve
from anabranch.models.config import read_config
from anabranch.platforms.cuda import CudaPlatform
from anabranch.platforms.platform import InlineStream, Memory
from tests.kernels.triton.ahead_of_time import NoDevice

CONFIGS = Path(offline.__file__).with_name("configs")
PUBLISHED = Path(__file__).parents[1] / "models" / "published"
SHARED_BYTES = (227 << 10) - 1024
PROCESSORS = 132
H200 = experts_tiles.Machine(SHARED_BYTES, PROCESSORS, wgmma=True, hopper=True)


class PaperPlatform(CudaPlatform):
    """A capture is its work, done once; a replay is none."""

    fp8_cache = True

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def memory(self) -> Memory:
        return Memory(free=139 << 30, total=139 << 30)

    def has(self, capability: str) -> bool:
        return capability in ("graphs", "streams", "bf16", "sm90")

    def make_side_stream(self) -> Any:
        return InlineStream()

    def make_graph_pool(self) -> Any:
        return None

    def synchronize(self) -> None:
        return None

    def fetch(self, tensor: torch.Tensor) -> Any:
        return SimpleNamespace(wait=lambda: tensor)

    def capture(self, function: Callable[[], object], pool: Any = None) -> Any:
        function()
        return SimpleNamespace(replay=lambda: None)


@contextmanager
def paper_h200() -> Iterator[None]:
    """Code that asks for the machine gets an H200, and the tables that are shipped for it."""
    modules = all_modules()

    def kernels_of(name: str) -> Callable[[torch.device], ModuleType]:
        module = importlib.import_module(f"{package.__name__}.{name}")
        return lambda device: module

    def shipped(device: torch.device, shape: experts_tiles.Shape) -> Any:
        good_for = experts_tables.good_for(shape, device)
        path = tables.SHIPPED / tables.file_name(good_for)
        return tables.read(path, experts_tables.CODEC, good_for, {"version": experts_tables.TILES_VERSION})

    changes: list[tuple[Any, str, Any]] = [
        *(
            (module, name, lambda device, answer=answer: answer)
            for module in modules
            for name, answer in (("dependent_launch", True), ("is_hopper", True), ("num_processors", PROCESSORS))
            if name in vars(module)
        ),
        *((module, "machine_of", lambda device: H200) for module in (attention, experts, latent_attention)),
        (experts, "hopper_kernels", kernels_of("experts_hopper")),
        (experts, "fp8_kernels", kernels_of("experts_hopper_fp8")),
        (experts, "packed_kernels", kernels_of("experts_hopper_packed")),
        (experts, "table_for", shipped),
        (linear, "hopper_kernels", kernels_of("linear_hopper")),
        (linear_quantized, "hopper_kernels", kernels_of("linear_hopper_fp8")),
        (linear_quantized, "packed_kernels", kernels_of("linear_hopper_packed")),
        (experts_tables, "device_facts", lambda device: ("sm_90", PROCESSORS)),
        (driver, "_active", NoDevice()),
        (precompile, "_zeroed", nullcontext),  # there is nothing to index with
        (load, "fill_randomly", lambda model: None),
        (load, "_is_finite", lambda scale: torch.tensor(True)),  # there is nothing to look at
        (Logprobs, "to_host", lambda self: self),  # there is nothing to copy
        # Page-locked memory is the driver's, and there is none.
        (torch.Tensor, "pin_memory", lambda self: self),
        (Sampler, "_upload", lambda self, values, dtype=torch.int64: torch.tensor(values, dtype=dtype).to(self.device)),
    ]
    for op in ops.OPS.values():  # they are bound again as they were
        changes += [(op, "bound", op.bound), (op, "forced", op.forced)]
    experts.chosen.cache_clear()
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        stack.callback(experts.chosen.cache_clear)
        yield


def cut_down(name: str, folder: Path) -> None:
    """A bundled or published config with a layer of each kind and one that has another before it."""
    file = PUBLISHED / f"{name}.json"
    config = json.loads((file if file.exists() else CONFIGS / name / "config.json").read_text())
    config["num_hidden_layers"] = 2
    if "full_attention_interval" in config:
        config["full_attention_interval"] = 2
    if "attn_type_list" in config:
        config["attn_type_list"] = [1, 1]
    if "moe_layer_end_index" in config:
        config["moe_layer_end_index"] = 1
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1
    if "layer_types" in config:
        config["layer_types"] = sorted(set(config["layer_types"]), reverse=True)
    (folder / "config.json").write_text(json.dumps(config))


def make_runner(name: str, folder: Path, **options: Any) -> TorchRunner:
    """Of a bundled or published config, cut down."""
    cut_down(name, folder)
    platform = PaperPlatform()
    model = read_config(folder)
    settings = EngineConfig(model=str(folder), load_format="dummy", tune="off", **options)
    settings = resolve(settings, model, platform)
    runner = TorchRunner(settings, platform, None)
    num_pages = runner.num_pages() if settings.num_pages else [1 << 16] * len(model.cache_groups)
    runner.allocate(num_pages, settings.max_model_len)
    return runner


def all_modules() -> list[ModuleType]:
    """Of the package of Triton kernels."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    return [importlib.import_module(name) for name in names]


def all_kernels() -> list[JITFunction[Any]]:
    """Of the package, called functions among them."""
    return [
        value
        for module in all_modules()
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.__module__ == module.__name__
    ]


def forget(kernels: Iterable[JITFunction[Any]]) -> None:
    """What this process has of them: of a device that was not there, or from earlier tests."""
    for kernel in kernels:
        kernel.device_caches.clear()


def differences(job: Job, known: list[Job]) -> str:
    """A job that was not expected, and how it differs from the nearest of those that were."""

    def facts(job: Job) -> dict[str, str]:
        names = job.kernel.arg_names

        def spell(path: tuple[int, ...]) -> str:
            return ".".join([names[path[0]], *map(str, path[1:])])

        found = {f"{name}": str(kind) for name, kind in job.signature.items()}
        found |= {spell(path): f"constant {value}" for path, value in job.constants.items()}
        found |= {f"{spell(path)} aligned": str(value) for path, value in job.attributes.items()}
        return found | {f"option {name}": str(value) for name, value in job.options.items()}

    mine = facts(job)
    best: list[str] | None = None
    for other in known:
        if other.kernel is job.kernel:
            theirs = facts(other)
            changed = [
                f"{name}: {theirs.get(name, '-')} → {mine.get(name, '-')}"
                for name in {**mine, **theirs}
                if mine.get(name) != theirs.get(name)
            ]
            if best is None or len(changed) < len(best):
                best = changed
    if best is None:
        return f"{job.kernel.__name__}: never launched"
    return f"{job.kernel.__name__}: {', '.join(best) or 'the dry run launches the same'}"
