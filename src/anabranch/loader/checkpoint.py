"""What a folder of safetensors files holds: each tensor's file, dtype, shape and byte range, from the headers alone.

Whatever can be wrong with the files is refused here, in one line that names the file (and the tensor), the cause and
the cure, before any weight is read. This file does not know what a tensor is for or which tensors a model wants, and
not how bytes become a tensor on a device. It does not import torch, so that planning starts at once.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from anabranch.models.config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_LFS_POINTER = b"version https://git-lfs"
_MAX_JSON_BYTES = 100_000_000  # the limit that the safetensors format sets for its header
_LENGTH_BYTES = 8  # a file begins with the length of its header: little-endian, unsigned

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What plain weights are stored as: safetensors' names and torch's."""
_FLOATS_8 = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}
DTYPES = FLOATS | _FLOATS_8 | {"I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8"}
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1} | dict.fromkeys(
    _FLOATS_8, 1
)
_OTHER_DTYPE = re.compile(r"BOOL|[IU](8|16|32|64)|C64|F[468](_\w+)?")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line with the file and the tensor, the cause and the cure."""


def _broken(where: object, why: str) -> CheckpointError:
    return CheckpointError(f"{where}: {why}; download it again")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor on disk. `begin` and `end` are byte offsets from the start of the file."""

    name: str
    file: Path
    dtype: str  # as safetensors spells it, one of DTYPES
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of one folder. Each file's tensors are contiguous and in file order."""

    folder: Path
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def read_checkpoint(folder: str | Path, quantized: bool = False) -> Checkpoint:
    """Read and check the headers of `model.safetensors`, else of the shards in the index, else of `*.safetensors`.

    `quantized`: config.json names a format of quantised weights, so tensors may hold integers."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder that holds the checkpoint")
    files, promised = _find_files(folder)
    if not files:
        raise _no_weights(folder)

    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for tensor in _read_header(file, quantized):
            if twin := tensors.get(tensor.name):
                raise CheckpointError(
                    f"{file}: tensor {tensor.name!r} is also in {twin.file.name}; remove the file that is left over"
                )
            tensors[tensor.name] = tensor
    for name, file in promised.items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(
                f"{file}: holds no tensor {name!r}, though {INDEX_FILE} places it there; download both again"
            )
    if not tensors:
        raise _broken(files[0], "holds no tensors")
    return Checkpoint(folder=folder, tensors=tensors, files=tuple(files))


def with_stored_dtype(config: ModelConfig, folder: str | Path, load_format: str = "safetensors") -> ModelConfig:
    """Where config.json names no dtype, that of the checkpoint counts: the one most bytes are in, without scales, of
    the first file that has plain numbers. Without weights the family's default stays."""
    if config.names_dtype or config.packed or load_format == "dummy":
        return config
    for file in _find_files(Path(folder))[0]:
        num_bytes = Counter[str]()
        for tensor in _read_header(file, quantized=True):
            if tensor.dtype in ("F32", "F16", "BF16") and "scale" not in tensor.name:
                num_bytes[FLOATS[tensor.dtype]] += tensor.num_bytes
        if num_bytes:
            return replace(config, dtype=num_bytes.most_common(1)[0][0])
    return config


def _find_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Files of weights, and for each tensor name the file in which an index places it."""
    # lexists: a dangling link is a broken checkpoint, to be reported, and not an absent one
    if os.path.lexists(folder / SINGLE_FILE):
        return [folder / SINGLE_FILE], {}
    if os.path.lexists(folder / INDEX_FILE):
        promised = _read_index(folder / INDEX_FILE)
        return sorted(set(promised.values())), promised
    return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith(".")), {}


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted({file.name for pattern in _PICKLE_PATTERNS for file in folder.glob(pattern)})
    if pickles:
        return CheckpointError(
            f"{folder}: holds only pickle weights ({pickles[0]}), which can run code when opened and so are never"
            " opened; convert them to safetensors, or take a revision that has safetensors"
        )
    return CheckpointError(
        f"{folder}: holds no weights; looked for {SINGLE_FILE}, {INDEX_FILE} and *.safetensors"
        " (a download may have stopped early)"
    )


def _read_index(index: Path) -> dict[str, Path]:
    """Map each tensor name to the shard that should hold it; every shard is known to exist."""
    text, num_bytes = _read_start(index, _MAX_JSON_BYTES)
    if num_bytes > _MAX_JSON_BYTES:
        raise _broken(index, f"corrupt index of {num_bytes} bytes")
    content = _parse_object(index, "index", text)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _broken(index, "corrupt index, 'weight_map' is missing or empty")

    shards: dict[str, Path] = {}
    promised: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise _broken(index, f"corrupt index, tensor {name!r} has no file name")
        if shard not in shards:
            shards[shard] = index.parent / _check_shard_name(index, shard)
        promised[name] = shards[shard]
    missing = sorted(shard for shard, file in shards.items() if not os.path.lexists(file))
    if missing:
        raise CheckpointError(
            f"{index}: shard {missing[0]!r} is missing ({len(missing)} of {len(shards)} shards are);"
            " finish the download of the checkpoint"
        )
    return promised


def _check_shard_name(index: Path, shard: str) -> str:
    path = PurePosixPath(shard)
    if path.is_absolute() or ".." in path.parts or "\0" in shard:
        raise CheckpointError(f"{index}: shard {shard!r} lies outside the folder; do not trust this checkpoint")
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{index}: shard {shard!r} is not a .safetensors file and is not opened; use a safetensors checkpoint"
        )
    return shard


def _read_header(file: Path, quantized: bool) -> Iterator[TensorInfo]:
    """Yield the tensors of one file in file order, once the layout of the whole file is known to be sound."""
    start, num_file_bytes = _read_start(file, _LENGTH_BYTES)
    if len(start) < _LENGTH_BYTES:
        raise _broken(file, f"truncated, expected a header of at least {_LENGTH_BYTES} bytes, found {num_file_bytes}")
    num_header_bytes = int.from_bytes(start, "little")
    if num_header_bytes > _MAX_JSON_BYTES:
        raise _broken(file, f"not a safetensors file, a header of {num_header_bytes} bytes is absurd")
    data_begin = _LENGTH_BYTES + num_header_bytes
    if data_begin > num_file_bytes:
        raise _broken(file, f"truncated, expected a header of {data_begin} bytes, found {num_file_bytes}")
    content = _parse_object(file, "header", _read_start(file, data_begin)[0][_LENGTH_BYTES:])
    content.pop("__metadata__", None)

    tensors = [_parse_tensor(file, name, entry, data_begin, quantized) for name, entry in content.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_layout(file, tensors, data_begin, num_file_bytes)
    yield from tensors


def _parse_tensor(file: Path, name: str, entry: Any, data_begin: int, quantized: bool) -> TensorInfo:
    where = f"{file}: tensor {name!r}"
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise _broken(where, "corrupt header, dtype, shape or data_offsets is missing or malformed")
    if _OTHER_DTYPE.fullmatch(dtype) and not (quantized and dtype in DTYPES):
        raise CheckpointError(
            f"{where} is {dtype}, only {', '.join(DTYPES if quantized else FLOATS)} can be loaded"
            + ("" if quantized else ": config.json has no quantization_config that could say what it means")
            + "; use the unquantised checkpoint"
        )
    if dtype not in _ITEM_BYTES:
        raise _broken(where, f"corrupt header, unknown dtype {dtype!r}")
    # type() and not isinstance(): JSON's true is an int to Python
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        numbers = f"shape {shape} and data_offsets {[begin, end]}"
        raise _broken(where, f"corrupt header, {numbers} must be whole numbers from 0 up")
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - begin != num_bytes:
        needs = f"{dtype} of shape {shape} needs {num_bytes} bytes"
        raise _broken(where, f"corrupt header, {needs} but its data_offsets {[begin, end]} span {end - begin}")
    return TensorInfo(name, file, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _check_layout(file: Path, tensors: list[TensorInfo], data_begin: int, num_file_bytes: int) -> None:
    """Tensors, sorted by offset, must fill the file from the end of the header to the last byte."""
    position = data_begin
    for tensor in tensors:
        if tensor.begin != position:
            fault = "overlaps the one before it" if tensor.begin < position else "leaves a hole before it"
            place = f"it begins at byte {tensor.begin} and not at {position}"
            raise _broken(f"{file}: tensor {tensor.name!r}", f"corrupt header, {place}, so it {fault}")
        position = tensor.end
    sizes = f"expected {position} bytes, found {num_file_bytes}"
    if position > num_file_bytes:
        cut = next(tensor for tensor in tensors if tensor.end > num_file_bytes)
        raise _broken(file, f"truncated, {sizes}; tensor {cut.name!r} is the first to be cut off")
    if position < num_file_bytes:
        raise _broken(file, f"{num_file_bytes - position} stray bytes after the last tensor, {sizes}")


def _read_start(file: Path, num_bytes: int) -> tuple[bytes, int]:
    """The first bytes of a file (fewer if it is shorter) and its size; refuses what is no content at all."""
    try:
        with open(file, "rb") as stream:
            num_file_bytes = os.fstat(stream.fileno()).st_size
            start = stream.read(num_bytes)
            stream.seek(0)
            is_pointer = stream.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError as error:
        if file.is_symlink() and not file.exists():
            raise _broken(file, f"is a link to {os.readlink(file)}, which does not exist") from error
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); check its permissions") from error
    if num_file_bytes == 0:
        raise _broken(file, "is empty (0 bytes)")
    if is_pointer:
        raise CheckpointError(f"{file}: is a Git LFS pointer and not the file itself; run `git lfs pull` in its folder")
    return start, num_file_bytes


def _parse_object(file: Path, part: str, text: bytes) -> dict[str, Any]:
    try:
        # decoded here, for json would also accept UTF-16 and UTF-32
        content = json.loads(text.decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"corrupt {part}, not JSON ({error})") from None
    if not isinstance(content, dict):
        raise _broken(file, f"corrupt {part}, a JSON object was expected")
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        name, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} appears twice")
    return content
