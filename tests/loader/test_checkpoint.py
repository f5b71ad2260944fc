"""Checkpoint headers: what safetensors says is what we read, and every kind of damage is refused in one line."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from anabranch.loader.checkpoint import Checkpoint, CheckpointError, TensorInfo, read_checkpoint, with_stored_dtype
from anabranch.models.config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_single(folder: Path) -> Path:
    """Three tensors of 24, 16 and 12 bytes, in that order in the file (safetensors sorts by dtype size, then name)."""
    tensors = {"b": torch.arange(4.0), "a": torch.arange(6.0), "c": torch.arange(6.0).bfloat16()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder / SINGLE


def write_sharded(folder: Path) -> None:
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4)}, folder / SHARDS[0])
    save_file({"c": torch.ones(5)}, folder / SHARDS[1])
    write_index(folder, {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]})


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 60}, "weight_map": weight_map}))


def edit_header(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the header of a real file and keep its data; what `edit` returns, if anything, replaces the header."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    replacement = edit(header)
    text = json.dumps(header if replacement is None else replacement).encode()
    write_header(file, text, content[8 + length :])


def write_header(file: Path, text: bytes, data: bytes = b"") -> None:
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def refusal(folder: Path) -> str:
    """The message of the refusal, with the folder cut out; always one line that starts with a path in the folder."""
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    return message.replace(f"{folder}/", "").replace(str(folder), "FOLDER")


def assert_equals_safetensors(checkpoint: Checkpoint) -> None:
    """Names, dtypes, shapes and the very bytes are those that the safetensors library reports."""
    names: list[str] = []
    for file in checkpoint.files:
        content = file.read_bytes()
        with safe_open(file, framework="pt") as reference:
            for name in reference.keys():  # noqa: SIM118 (not a mapping)
                names.append(name)
                tensor = checkpoint.tensors[name]
                view = reference.get_slice(name)
                assert (tensor.name, tensor.file) == (name, file)
                assert tensor.dtype == view.get_dtype()
                assert tensor.shape == tuple(view.get_shape())
                expected = reference.get_tensor(name)
                assert tensor.num_elements == expected.numel()
                assert tensor.num_bytes == expected.numel() * expected.element_size()
                raw = expected.contiguous().flatten().view(torch.uint8).numpy().tobytes() if expected.numel() else b""
                assert content[tensor.begin : tensor.end] == raw
    assert sorted(names) == sorted(checkpoint.tensors)
    assert checkpoint.num_bytes == sum(tensor.num_bytes for tensor in checkpoint.tensors.values())


# Good checkpoints


def test_single_file(tmp_path: Path) -> None:
    file = write_single(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.folder == tmp_path
    assert checkpoint.files == (file,)
    assert checkpoint.num_bytes == 24 + 16 + 12
    data_begin = file.stat().st_size - 52
    assert checkpoint.tensors["a"] == TensorInfo("a", file, "F32", (6,), data_begin, data_begin + 24)
    assert list(checkpoint.tensors) == ["a", "b", "c"]
    assert_equals_safetensors(checkpoint)


def test_sharded_by_transformers(tmp_path: Path) -> None:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes: Any = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model: Any = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes))  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="8KB")
    checkpoint = read_checkpoint(str(tmp_path))
    assert len(checkpoint.files) > 1
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in checkpoint.tensors
    assert checkpoint.num_bytes == json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"]
    assert_equals_safetensors(checkpoint)


@pytest.mark.parametrize("seed", range(8))
def test_random_files_equal_safetensors(tmp_path: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for file_id in range(1 + draw(3)):  # neither of the usual names: any *.safetensors will do
        tensors = {}
        for tensor_id in range(1 + draw(12)):
            shape = [draw(5) for _ in range(draw(4))]  # scalars and empty tensors included
            name = f'{"λ" * draw(3)}layer.{file_id}.{tensor_id}\n"{draw(100)}'
            tensors[name] = torch.randn(shape, generator=generator).to(dtypes[draw(4)])
        save_file(tensors, tmp_path / f"part{file_id}.safetensors")
    assert_equals_safetensors(read_checkpoint(tmp_path))


def test_header_in_any_order(tmp_path: Path) -> None:
    file = write_single(tmp_path)
    edit_header(file, lambda header: dict(reversed(header.items())))
    checkpoint = read_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a", "b", "c"]  # the order of the file
    assert_equals_safetensors(checkpoint)


def test_symlinked_files_and_folder(tmp_path: Path) -> None:
    """The layout of the hub cache: a folder of links into a folder of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_sharded(blobs)
    for file in list(blobs.iterdir()):
        blob = file.rename(blobs / f"blob-of-{file.stem}")
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (tmp_path / "link").symlink_to(snapshot)
    checkpoint = read_checkpoint(tmp_path / "link")
    assert sorted(checkpoint.tensors) == ["a", "b", "c"]
    assert_equals_safetensors(checkpoint)


def test_stored_dtype_is_that_of_most_plain_bytes(tmp_path: Path) -> None:
    config = ModelConfig(
        model_type="x",
        vocab_size=1,
        hidden_size=1,
        layers=(),
        activation="silu",
        norm_eps=1.0,
        tie_embeddings=False,
        max_position=1,
        names_dtype=False,
    )

    def dtype(folder: Path, **tensors: torch.Tensor) -> str:
        save_file(tensors, folder / SINGLE)
        return with_stored_dtype(config, folder).dtype

    assert with_stored_dtype(config, tmp_path) == config
    half, quantized = torch.ones(8).bfloat16(), {"b": torch.ones(99).to(torch.float8_e4m3fn), "b.scale": torch.ones(9)}
    assert dtype(tmp_path, **quantized) == "float32"
    assert dtype(tmp_path, **quantized, a=torch.ones(3), c=half) == "bfloat16"
    assert dtype(tmp_path, a=torch.ones(3).half(), b=torch.ones(9, dtype=torch.int64)) == "float16"
    assert with_stored_dtype(config, tmp_path, "dummy") == config
    assert with_stored_dtype(replace(config, names_dtype=True), tmp_path).dtype == "float32"
    (tmp_path / SINGLE).unlink()
    save_file(quantized, tmp_path / SHARDS[0])
    save_file({"a": half}, tmp_path / SHARDS[1])
    write_index(tmp_path, {"b": SHARDS[0], "b.scale": SHARDS[0], "a": SHARDS[1]})
    assert with_stored_dtype(config, tmp_path).dtype == "bfloat16"


def test_single_file_wins_over_index_and_strays(tmp_path: Path) -> None:
    write_single(tmp_path)
    write_index(tmp_path, {"a": "gone.safetensors"})
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert read_checkpoint(tmp_path).files == (tmp_path / SINGLE,)


def test_index_wins_over_strays_and_may_name_a_subfolder(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "part" / "x.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    write_index(tmp_path, {"a": "part/x.safetensors"})
    assert read_checkpoint(tmp_path).files == (tmp_path / "part" / "x.safetensors",)


def test_hidden_files_are_not_weights(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    (tmp_path / "._weights.safetensors").write_bytes(b"left by a file manager")
    assert list(read_checkpoint(tmp_path).tensors) == ["a"]


def test_torch_is_not_imported() -> None:
    import subprocess
    import sys

    code = "import anabranch.loader.checkpoint, anabranch.loader.locate, sys"
    code += "; sys.exit(any(name in sys.modules for name in ('torch', 'huggingface_hub', 'transformers')))"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": path})


# Folders without usable weights


def test_no_such_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone") == "FOLDER: no such folder; give the folder that holds the checkpoint"


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path) == (
        "FOLDER: holds no weights; looked for model.safetensors, model.safetensors.index.json and *.safetensors"
        " (a download may have stopped early)"
    )


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth", "last.ckpt"]
)
def test_pickle_weights_are_never_opened(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02.")

    def refuse_to_open(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"opened {args}")

    monkeypatch.setattr("builtins.open", refuse_to_open)
    assert refusal(tmp_path) == (
        f"FOLDER: holds only pickle weights ({name}), which can run code when opened and so are never opened;"
        " convert them to safetensors, or take a revision that has safetensors"
    )


# The index


def test_missing_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    assert refusal(tmp_path) == (
        f"{INDEX}: shard '{SHARDS[1]}' is missing (1 of 2 shards are); finish the download of the checkpoint"
    )


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (b"<html>", r"corrupt index, not JSON \(Expecting value: line 1 column 1 \(char 0\)\)"),
        (b'{"weight_map": {"a": ', r"corrupt index, not JSON \(Expecting value: .*\)"),
        (b"\xff\xfe", r"corrupt index, not JSON \('utf-8' codec can't decode .*\)"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', r"corrupt index, not JSON \('a' appears twice\)"),
        (b"[" * 100_000, r"corrupt index, not JSON \(maximum recursion depth exceeded.*\)"),
        (b"[]", "corrupt index, a JSON object was expected"),
        (b"{}", "corrupt index, 'weight_map' is missing or empty"),
        (b'{"weight_map": []}', "corrupt index, 'weight_map' is missing or empty"),
        (b'{"weight_map": {}}', "corrupt index, 'weight_map' is missing or empty"),
        (b'{"weight_map": {"a": 7}}', "corrupt index, tensor 'a' has no file name"),
        (b"", r"is empty \(0 bytes\)"),
    ],
)
def test_corrupt_index(tmp_path: Path, text: bytes, cause: str) -> None:
    write_sharded(tmp_path)
    (tmp_path / INDEX).write_bytes(text)
    assert re.fullmatch(f"{re.escape(INDEX)}: {cause}; download it again", refusal(tmp_path))


def test_absurdly_long_index_is_not_parsed(tmp_path: Path) -> None:
    with open(tmp_path / INDEX, "wb") as stream:
        stream.truncate(100_000_001)  # a sparse file
    assert refusal(tmp_path) == f"{INDEX}: corrupt index of 100000001 bytes; download it again"


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "a/../../x.safetensors", "/etc/x.safetensors", "a\0.safetensors"]
)
def test_shard_outside_the_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    write_index(folder, {"a": shard})
    assert refusal(folder) == f"{INDEX}: shard {shard!r} lies outside the folder; do not trust this checkpoint"


def test_index_of_pickles(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "pytorch_model.bin"})
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    assert refusal(tmp_path) == (
        f"{INDEX}: shard 'pytorch_model.bin' is not a .safetensors file and is not opened; use a safetensors checkpoint"
    )


@pytest.mark.parametrize("name", ["absent", "c"])  # in no shard; in the other shard
def test_tensor_not_in_its_shard(tmp_path: Path, name: str) -> None:
    write_sharded(tmp_path)
    write_index(tmp_path, {"a": SHARDS[0], name: SHARDS[0], "b": SHARDS[0], "d": SHARDS[1]})
    assert refusal(tmp_path) == (
        f"{SHARDS[0]}: holds no tensor {name!r}, though {INDEX} places it there; download both again"
    )


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"c": torch.ones(5), "a": torch.ones(2, 3)}, tmp_path / SHARDS[1])
    assert refusal(tmp_path) == f"{SHARDS[1]}: tensor 'a' is also in {SHARDS[0]}; remove the file that is left over"


# Files that are not whole


def test_zero_byte_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).touch()
    assert refusal(tmp_path) == f"{SINGLE}: is empty (0 bytes); download it again"


def test_git_lfs_pointer(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4976698672\n"
    (tmp_path / SHARDS[1]).write_text(pointer)
    assert refusal(tmp_path) == (
        f"{SHARDS[1]}: is a Git LFS pointer and not the file itself; run `git lfs pull` in its folder"
    )


@pytest.mark.parametrize("name", [SINGLE, INDEX, "other.safetensors"])
def test_dangling_link(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("../blobs/gone")
    assert refusal(tmp_path) == f"{name}: is a link to ../blobs/gone, which does not exist; download it again"


def test_dangling_single_file_is_not_passed_over_for_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / SINGLE).symlink_to("../blobs/gone")
    assert refusal(tmp_path).startswith(f"{SINGLE}: is a link to ../blobs/gone")


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).mkdir()  # a folder, for permissions do not stop root
    assert refusal(tmp_path) == f"{SINGLE}: cannot be read (Is a directory); check its permissions"


def test_truncated_everywhere(tmp_path: Path) -> None:
    """Cut after any byte, a file is refused with its expected and its actual size."""
    file = write_single(tmp_path)
    content = file.read_bytes()
    data_begin = len(content) - 52
    for size in range(1, len(content)):
        file.write_bytes(content[:size])
        if size < 8:
            cause = f"truncated, expected a header of at least 8 bytes, found {size}"
        elif size < data_begin:
            cause = f"truncated, expected a header of {data_begin} bytes, found {size}"
        else:
            cut = "a" if size < data_begin + 24 else "b" if size < data_begin + 40 else "c"
            cause = f"truncated, expected {len(content)} bytes, found {size}; tensor '{cut}' is the first to be cut off"
        assert refusal(tmp_path) == f"{SINGLE}: {cause}; download it again"


def test_trailing_garbage(tmp_path: Path) -> None:
    file = write_single(tmp_path)
    size = file.stat().st_size
    with open(file, "ab") as stream:
        stream.write(b"\0" * 5)
    assert refusal(tmp_path) == (
        f"{SINGLE}: 5 stray bytes after the last tensor, expected {size} bytes, found {size + 5}; download it again"
    )


# Headers that do not make sense


@pytest.mark.parametrize(
    "start", [b"\xff" * 8, b"<!doctype html>", b"PK\x03\x04\x00\x00\x08\x08", b"\x01\xe1\xf5\x05\0\0\0\0"]
)
def test_absurd_header_length(tmp_path: Path, start: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(start + b" " * 100)
    length = int.from_bytes(start[:8], "little")
    assert refusal(tmp_path) == (
        f"{SINGLE}: not a safetensors file, a header of {length} bytes is absurd; download it again"
    )


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (b"", r"corrupt header, not JSON \(Expecting value: .*\)"),
        (b"garbage", r"corrupt header, not JSON \(Expecting value: .*\)"),
        (b'{"a": ', r"corrupt header, not JSON \(Expecting value: .*\)"),
        (b"\xff\xff", r"corrupt header, not JSON \('utf-8' codec .*\)"),
        ('{"a": 1}'.encode("utf-16"), r"corrupt header, not JSON \('utf-8' codec .*\)"),
        (b"[" * 100_000, r"corrupt header, not JSON \(maximum recursion depth exceeded.*\)"),
        (b"9" * 5000, r"corrupt header, not JSON \(Exceeds the limit .*\)"),
        (b'{"a": 1, "a": 2}', r"corrupt header, not JSON \('a' appears twice\)"),
        (b"[]", "corrupt header, a JSON object was expected"),
        (b"{}", "holds no tensors"),
        (b'{"__metadata__": {"format": "pt"}}', "holds no tensors"),
    ],
)
def test_corrupt_header(tmp_path: Path, text: bytes, cause: str) -> None:
    write_header(tmp_path / SINGLE, text)
    assert re.fullmatch(f"{re.escape(SINGLE)}: {cause}; download it again", refusal(tmp_path))


@pytest.mark.parametrize("entry", [None, 7, [], {}, {"dtype": "F32", "shape": [6]}, {"dtype": 1}])
def test_malformed_entry(tmp_path: Path, entry: Any) -> None:
    file = write_single(tmp_path)
    edit_header(file, lambda header: header.update(b=entry))
    assert refusal(tmp_path) == (
        f"{SINGLE}: tensor 'b': corrupt header, dtype, shape or data_offsets is missing or malformed; download it again"
    )


@pytest.mark.parametrize("offsets", [[24], [24, 40, 56], "24", {"24": 40}, None])
def test_malformed_offsets(tmp_path: Path, offsets: Any) -> None:
    file = write_single(tmp_path)
    edit_header(file, lambda header: header["b"].update(data_offsets=offsets))
    assert "tensor 'b': corrupt header, dtype, shape or data_offsets is missing or malformed" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [([-4], [24, 40]), ([4], [-8, 8]), ([4], [24, 40.0]), ([True], [24, 28]), (["4"], [24, 40]), ([None], [24, 40])],
)
def test_numbers_that_are_not_counts(tmp_path: Path, shape: Any, offsets: Any) -> None:
    file = write_single(tmp_path)
    edit_header(file, lambda header: header["b"].update(shape=shape, data_offsets=offsets))
    assert refusal(tmp_path) == (
        f"{SINGLE}: tensor 'b': corrupt header, shape {shape} and data_offsets {offsets} must be whole numbers"
        " from 0 up; download it again"
    )


@pytest.mark.parametrize(
    ("shape", "offsets"), [([5], [24, 40]), ([4], [24, 36]), ([4], [40, 24]), ([2**62, 9], [24, 40])]
)
def test_size_that_does_not_fit_the_shape(tmp_path: Path, shape: list[int], offsets: list[int]) -> None:
    file = write_single(tmp_path)
    edit_header(file, lambda header: header["b"].update(shape=shape, data_offsets=offsets))
    num_bytes = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    assert refusal(tmp_path) == (
        f"{SINGLE}: tensor 'b': corrupt header, F32 of shape {shape} needs {num_bytes} bytes but its data_offsets"
        f" {offsets} span {offsets[1] - offsets[0]}; download it again"
    )


@pytest.mark.parametrize(("shift", "fault"), [(-8, "overlaps the one before it"), (8, "leaves a hole before it")])
def test_overlap_and_hole(tmp_path: Path, shift: int, fault: str) -> None:
    file = write_single(tmp_path)
    edit_header(file, lambda header: header["b"].update(data_offsets=[24 + shift, 40 + shift]))
    if shift > 0:  # make room, so that only the hole is wrong
        edit_header(file, lambda header: header["c"].update(data_offsets=[48, 60]))
        file.write_bytes(file.read_bytes() + b"\0" * 8)
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert refusal(tmp_path) == (
        f"{SINGLE}: tensor 'b': corrupt header, it begins at byte {begin + 24 + shift} and not at {begin + 24},"
        f" so it {fault}; download it again"
    )


def test_hole_before_the_first_tensor(tmp_path: Path) -> None:
    file = write_single(tmp_path)
    edit_header(file, lambda header: header.pop("a") and header)
    assert "tensor 'b': corrupt header, it begins at byte" in (message := refusal(tmp_path))
    assert "leaves a hole before it" in message


def test_unknown_dtype(tmp_path: Path) -> None:
    file = write_single(tmp_path)
    edit_header(file, lambda header: header["b"].update(dtype="F33"))
    assert refusal(tmp_path) == f"{SINGLE}: tensor 'b': corrupt header, unknown dtype 'F33'; download it again"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.float8_e8m0fnu, "F8_E8M0"),
        (torch.float8_e4m3fnuz, "F8_E4M3FNUZ"),
        (torch.float8_e5m2fnuz, "F8_E5M2FNUZ"),
        (torch.float4_e2m1fn_x2, "F4"),
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int16, "I16"),
        (torch.int32, "I32"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
    ],
)
def test_quantised_dtypes(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    packed = torch.zeros(4, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(4, dtype=dtype)
    save_file({"norm": torch.ones(2), "experts.0.qweight": packed}, tmp_path / SINGLE)
    assert refusal(tmp_path) == (
        f"{SINGLE}: tensor 'experts.0.qweight' is {name}, only F64, F32, F16, BF16 can be loaded:"
        " config.json has no quantization_config that could say what it means; use the unquantised checkpoint"
    )


@pytest.mark.parametrize("name", ["F6_E2M3", "F6_E3M2", "U16", "U32", "U64", "C64"])
def test_dtypes_that_torch_does_not_write(tmp_path: Path, name: str) -> None:
    file = write_single(tmp_path)
    edit_header(file, lambda header: header["b"].update(dtype=name))
    assert f"tensor 'b' is {name}, only" in refusal(tmp_path)


def test_names_cannot_break_the_line(tmp_path: Path) -> None:
    save_file({"a\nb": torch.zeros(1, dtype=torch.int8)}, tmp_path / SINGLE)
    assert "tensor 'a\\nb' is I8" in refusal(tmp_path)
