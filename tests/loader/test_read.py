"""Bytes get where they belong, whatever their place in the file, their size, dtype and target; files that shrink are
refused; the host holds little."""

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anabranch import platforms
from anabranch.formats.scaled import Scaled
from anabranch.loader import names, read
from anabranch.loader.checkpoint import CheckpointError, TensorInfo, read_checkpoint
from anabranch.loader.load import build
from anabranch.loader.names import Copy
from anabranch.loader.read import ALIGNMENT, MOST_PARTS, Reader, cut, read_weights
from anabranch.models.config import read_config
from anabranch.platforms import Platform, Take
from anabranch.platforms.fake import FakePlatform, FakeStaging
from tests.models import tiny

PLATFORMS = ["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PARTS = slice(0, 3), slice(3, 7)


@dataclass
class Case:
    """A checkpoint, parameters to fill from it, and what they must then hold."""

    copies: list[Copy]
    parameters: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor] = field(default_factory=dict)


def draw(folder: Path, seed: int, device: torch.device) -> Case:
    """Tensors of all sizes and dtypes in three files; each fills a parameter in one of the ways there are."""
    generator = torch.Generator().manual_seed(seed)

    def pick(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    files: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for i in range(30):
        rows = (1, 2, 7, 50, 1000)[pick(5)]
        tensor = torch.randn(rows, 7, generator=generator).to(DTYPES[pick(4)])
        files[pick(3)][f"t{i}"] = tensor[0, 0].clone() if pick(6) == 0 else tensor
    files[0]["nothing"] = torch.empty(0, 7)
    for i, tensors in enumerate(files):
        save_file(tensors, folder / f"part{i}.safetensors", metadata={"x": "y" * pick(8)})
    checkpoint = read_checkpoint(folder)
    case = Case([], {})
    loaded = {name: tensor for i in range(3) for name, tensor in load_file(folder / f"part{i}.safetensors").items()}
    for name, tensor in loaded.items():
        dtype = tensor.dtype if pick(3) else DTYPES[pick(4)]
        way = pick(4) if tensor.dim() == 2 else 0
        source = checkpoint.tensors[name]
        if pick(8) == 0:  # not wanted: leaves a gap between its neighbours
            continue
        if way == 1:  # into rows of a packed parameter
            pack(case, name, torch.zeros(3, *tensor.shape, dtype=dtype, device=device), [Copy(source, name, (1,))])
        elif way == 2:  # into columns: not contiguous
            wide = torch.zeros(tensor.shape[0], 20, dtype=dtype, device=device)
            pack(case, name, wide, [Copy(source, name, (slice(None), slice(5, 12)))])
        elif way == 3:  # columns of it into two places
            target = torch.zeros(2, tensor.shape[0], 4, dtype=dtype, device=device)
            indices = [(0, slice(None), slice(0, 3)), (1,)]
            both = zip(indices, PARTS, strict=True)
            pack(case, name, target, [Copy(source, name, index, (slice(None), part)) for index, part in both])
        else:
            pack(case, name, torch.zeros(tensor.shape, dtype=dtype, device=device), [Copy(source, name, ())])
        case.expected[name] = torch.zeros(case.parameters[name].shape, dtype=dtype)
        for copy in case.copies:
            if copy.parameter == name:
                case.expected[name][copy.index] = tensor[copy.part].to(dtype)
    case.copies.sort(key=lambda copy: (copy.source.file, copy.source.begin))
    return case


def pack(case: Case, name: str, parameter: torch.Tensor, copies: list[Copy]) -> None:
    case.parameters[name] = parameter
    case.copies += copies


@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("limit", [64, 3000, 1 << 24])
@pytest.mark.parametrize("seed", range(4))
def test_every_element_arrives(tmp_path: Path, name: str, limit: int, seed: int) -> None:
    platform = platforms.make(name)
    case = draw(tmp_path, seed, platform.device)
    seen: list[tuple[int, int, int]] = []
    num_bytes = read_weights(
        case.parameters,
        case.copies,
        platform,
        lambda done, total: seen.append((done, total, threading.get_ident())),
        threads=3,
        limit=limit,
    )
    for parameter, expected in case.expected.items():
        assert torch.equal(case.parameters[parameter].cpu(), expected), parameter
    wanted = {copy.source.name: copy.source.num_bytes for copy in case.copies}
    assert num_bytes == sum(wanted.values())
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][:2] == (num_bytes, num_bytes)
    assert {thread for _, _, thread in seen} == {threading.get_ident()}, "a socket belongs to one thread"


def test_spans_cover_each_byte_once_and_are_small(tmp_path: Path) -> None:
    case = draw(tmp_path, 7, torch.device("cpu"))
    for limit in (64, 3000, 1 << 24):
        spans = list(cut(case.parameters, case.copies, limit))
        read: dict[str, list[int]] = {}
        for span in spans:
            assert 0 < len(span.parts) <= MOST_PARTS
            at = span.begin
            for part in span.parts:
                read.setdefault(part.source.name, []).append(part.num_bytes)
                size = part.source.num_bytes // part.source.num_elements
                assert at == part.source.begin + part.first * size and span.file == part.source.file
                at += part.num_bytes
            assert span.num_bytes <= limit or len(span.parts) == 1
        assert {name: sum(sizes) for name, sizes in read.items()} == {
            copy.source.name: copy.source.num_bytes for copy in case.copies if copy.source.num_bytes
        }
    whole = len(list(cut(case.parameters, case.copies, 1 << 24)))
    assert whole < len(case.copies) / 2, "neighbours are read together"


def test_many_small_tensors_are_not_too_many_for_one_read(tmp_path: Path) -> None:
    tensors = {f"t{i:05}": torch.full((3,), float(i)) for i in range(3 * MOST_PARTS)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    parameters = {name: torch.zeros(3) for name in tensors}
    copies = [Copy(checkpoint.tensors[name], name, ()) for name in checkpoint.tensors]
    read_weights(parameters, copies, platforms.make("cpu"))
    assert all(torch.equal(parameters[name], tensor) for name, tensor in tensors.items())


class CountingPlatform(FakePlatform):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.taken: list[int] = []
        """Bytes of tensors that were converted or taken apart."""

    def make_staging(self, num_bytes: int) -> FakeStaging:
        self.sizes.append(num_bytes)
        return CountingStaging(num_bytes, self.taken)


class CountingStaging(FakeStaging):
    def __init__(self, num_bytes: int, taken: list[int]) -> None:
        super().__init__(num_bytes)
        self.taken = taken

    def put(self, source: torch.Tensor, places: Sequence[tuple[torch.Tensor, Take | None]]) -> None:
        if any(take is not None for _, take in places):
            self.taken.append(source.nbytes)
        super().put(source, places)


def test_the_host_holds_two_small_buffers_a_thread(tmp_path: Path) -> None:
    save_file({"large": torch.randn(300_000), "small": torch.randn(10)}, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    parameters = {"large": torch.zeros(300_000), "small": torch.zeros(10)}
    copies = [Copy(checkpoint.tensors[name], name, ()) for name in checkpoint.tensors]
    platform = CountingPlatform()
    read_weights(parameters, copies, platform, threads=2, limit=10_000)
    assert len(platform.sizes) <= 4 and max(platform.sizes) < 11_000
    expected = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_fused_experts_are_converted_a_few_at_a_time(
    tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host and the device hold besides the weights does not grow with the number of experts."""
    case = next(case for case in tiny.CASES if case.model_type == "qwen3_moe" and case.experts == "fused")
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 32, "head_dim": 32}
    folder = tiny.save(dataclasses.replace(case, settings=case.settings | sizes, sharded=False), tmp_path)
    checkpoint = read_checkpoint(folder)
    one_expert = 4 * 2 * 128 * 128

    def load(limit: int) -> tuple[dict[str, torch.Tensor], CountingPlatform]:
        monkeypatch.setattr(names, "SLICE", limit)
        decoder = build(read_config(folder), torch.float32)
        copies = names.match(decoder, checkpoint, quantization)
        decoder.to_empty(device="cpu")
        platform, parameters = CountingPlatform(), dict(decoder.named_parameters())
        total = read_weights(parameters, copies, platform, threads=2, limit=limit)
        assert total == checkpoint.num_bytes
        return parameters, platform

    whole, large = load(1 << 30)
    sliced, small = load(2 * one_expert)
    assert max(large.sizes) >= 32 * one_expert and max(small.sizes) <= 2 * one_expert + MOST_PARTS * ALIGNMENT
    assert max(small.taken) <= 2 * one_expert < max(large.taken)
    assert all(torch.equal(sliced[name], tensor) for name, tensor in whole.items())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process's memory is Linux's")
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    case = next(case for case in tiny.CASES if case.model_type == "qwen3_moe" and case.experts == "fused")
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 1}
    settings = case.settings | sizes | {"decoder_sparse_step": 1}
    folder = tiny.save(dataclasses.replace(case, settings=settings, sharded=False), tmp_path)
    fused = max(tensor.num_bytes for tensor in read_checkpoint(folder).tensors.values())
    assert fused == 32 * 2 * 512 * 512 * 4
    few = str(2 << 20)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    command = [sys.executable, "-m", "tests.loader.peak_memory", str(folder), few, few, str(1 << 30), few]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    _, sliced, whole, again = map(int, done.stdout.split())
    assert max(sliced, again) < fused // 3, "a few experts at a time"
    assert whole > fused, "what it is without slices, so that the measure is one"


@pytest.mark.parametrize("name", PLATFORMS)
def test_scales_that_are_stored_as_exponents(tmp_path: Path, name: str) -> None:
    platform, scale = platforms.make(name), torch.tensor([[2.0**-127, 0.5], [1.0, 2.0**127]])
    save_file({"scale": scale.to(torch.float8_e8m0fnu)}, tmp_path / "model.safetensors")
    info = read_checkpoint(tmp_path, quantized=True).tensors["scale"]
    assert info.dtype == "F8_E8M0"
    parameters = {
        "scale": torch.zeros(2, 2, device=platform.device),
        "spread": torch.zeros(4, 2, device=platform.device),
    }
    source = Scaled("fp8", 128, 128, "_scale_inv")
    convert = partial(source.convert, "scale", shape=(256, 256), format=source.format((64,)))
    read_weights(parameters, [Copy(info, "scale", ()), Copy(info, "spread", (), (), convert)], platform)
    assert torch.equal(parameters["scale"].cpu(), scale)
    assert torch.equal(parameters["spread"].cpu(), scale.repeat_interleave(2, 0))


@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("begin", [4, 5], ids=["aligned", "unaligned"])
def test_a_part_is_taken_before_it_is_converted(tmp_path: Path, name: str, begin: int) -> None:
    """And read alone, but for one whose numbers lie across words of memory; two copies of one part are read once."""
    platform, tensor = platforms.make(name), torch.arange(48, dtype=torch.int32).view(6, 8)
    file = tmp_path / "x"
    file.write_bytes(bytes(begin) + tensor.numpy().tobytes())
    info = TensorInfo("x", file, "I32", (6, 8), begin, begin + tensor.nbytes)
    part = slice(1, 6, 2), slice(2, 5)
    seen: list[tuple[int, ...]] = []

    def convert(source: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(source.shape))
        return source.T * 2

    copies = [Copy(info, "some", (), part, convert, (slice(1, 3),)), Copy(info, "all", (0,), part, convert)]
    parameters = {"some": torch.zeros(2, 3), "all": torch.zeros(2, 3, 3, dtype=torch.int32)}
    parameters = {key: parameter.to(platform.device) for key, parameter in parameters.items()}
    num_bytes = read_weights(parameters, copies, platform)
    assert num_bytes == (9 if begin == 4 else 48) * 4 and seen == [(3, 3)] * 2
    expected = tensor[part].T * 2
    assert torch.equal(parameters["some"].cpu(), expected[1:3].float())
    assert torch.equal(parameters["all"].cpu(), torch.stack([expected, torch.zeros_like(expected)]))


def test_large_buffers_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has two; what is converted is read in one go."""
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    parameters = {name: torch.zeros(64, 32) for name in tensors}
    part = slice(None), slice(0, 32)
    copies = [Copy(info, name, (), (), torch.clone, part) for name, info in checkpoint.tensors.items()]
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(read, "BUFFERS", 4 * 64 * 64 * 4)
    platform = CountingPlatform()
    read_weights(parameters, copies, platform, limit=1000)
    assert len(platform.sizes) <= 4
    assert all(torch.equal(parameters[name], tensor[part]) for name, tensor in tensors.items())


def test_a_read_that_stops_early_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As reads of more than 2 GB do, and those that a signal interrupts."""
    case = draw(tmp_path, 3, torch.device("cpu"))
    preadv = os.preadv

    def one_third(file: int, buffers: list[Any], offset: int) -> int:
        size = sum(buffer.nbytes for buffer in buffers)
        short = bytearray(max(1, size // 3))
        count = preadv(file, [short], offset)
        rest = memoryview(short)[:count]
        for buffer in buffers:
            taken = min(buffer.nbytes, rest.nbytes)
            buffer[:taken] = rest[:taken]
            rest = rest[taken:]
        return count

    monkeypatch.setattr(os, "preadv", one_third)
    read_weights(case.parameters, case.copies, platforms.make("cpu"), limit=3000)
    assert all(torch.equal(case.parameters[name], expected) for name, expected in case.expected.items())


@pytest.mark.parametrize("platform", [platforms.make("cpu"), platforms.make("fake")], ids=["cpu", "fake"])
def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, platform: Platform) -> None:
    case = draw(tmp_path, 5, platform.device)
    last = case.copies[-1].source
    os.truncate(last.file, last.end - 1)
    with pytest.raises(CheckpointError) as caught:
        read_weights(case.parameters, case.copies, platform, limit=3000)
    assert str(caught.value) == f"{last.file}: became shorter while it was read; download it again"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


def test_files_are_closed_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(tmp_path, 5, torch.device("cpu"))
    monkeypatch.setattr(Reader, "read", lambda self, span: 1 / 0)
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else set()
    with pytest.raises(ZeroDivisionError):
        read_weights(case.parameters, case.copies, platforms.make("cpu"))
    after = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else set()
    assert len(after) <= len(before)
