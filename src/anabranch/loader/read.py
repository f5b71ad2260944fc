"""Bytes of tensors from files into parameters: several threads, each with one large read at a time.

A span is a run of bytes in one file and where its parts go. On a device with memory of its own a span is read into
staging buffers (page-locked, if the platform has such) and copied from there while the thread reads the next one; so
the host holds two small buffers a thread and never the model. Where the parameters are in host memory, bytes are read
to their place: no copy, no second model in memory.

Of a matrix whose columns are divided among ranks only this rank's are copied, out of a mapping of the file: 1.9 ms for
half of each of 2048 rows of 8 KB, where reading the rows whole takes 5.3 ms and a read for each row 6.9 ms (LOG.md).

Whether the files are sound was asked before (`checkpoint`), as was what goes where (`names`).
"""

import ctypes
import functools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch

from anabranch.formats import Index, Source
from anabranch.formats.packed4 import Packed4
from anabranch.loader import checkpoint
from anabranch.loader.checkpoint import Checkpoint, CheckpointError, TensorInfo
from anabranch.loader.names import Copy, some_rows
from anabranch.platforms import Platform, Staging, Take

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), by the thread that reads weights."""

ALIGNMENT = 256
"""Of tensors in a buffer, whatever their place in the file."""
MOST_PARTS = 512
"""Of a span: the system takes 1024 at once."""
SPAN = (16 << 20) - MOST_PARTS * ALIGNMENT
"""Bytes of a read: large enough that Python does not matter, small enough that buffers stay in the host's cache. A
buffer is then 16 MB, no more: page-locked memory comes in powers of two."""
THREADS = 12
BUFFERS = 512 << 20
"""Bytes of all buffers: tensors that are converted whole may be larger than SPAN, and then fewer threads read."""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, ours) for name, ours in checkpoint.DTYPES.items()}

Place = tuple[torch.Tensor, Take | None]
"""A view into a parameter, and what is taken from the checkpoint's tensor for it; None: all of it, as it is."""


def same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors of a checkpoint are equal, read from their files up to the first difference."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open(one.file, "rb") as left, open(other.file, "rb") as right:
        left.seek(one.begin)
        right.seek(other.begin)
        for begin in range(0, one.num_bytes, SPAN):
            size = min(SPAN, one.num_bytes - begin)
            if left.read(size) != right.read(size):
                return False
    return True


def check_order(checkpoint: Checkpoint, sources: Sequence[Source]) -> None:
    """CheckpointError where `g_idx`, the group of each input of a GPTQ weight, is not that of groups in order."""
    group = next((source.group for source in sources if isinstance(source, Packed4)), 0)
    stored = [info for name, info in checkpoint.tensors.items() if sources and name.endswith(".g_idx")]
    for path, infos in groupby(sorted(stored, key=lambda info: (info.file, info.begin)), key=lambda info: info.file):
        with open(path, "rb") as file:
            for info in infos:
                file.seek(info.begin)
                if file.read(info.num_bytes) != _in_order(info.num_elements, group, info.dtype):
                    raise CheckpointError(
                        f"{info.file}: tensor {info.name!r} has inputs in the order of activations, which is not "
                        "supported; use a checkpoint that was made without desc_act"
                    )


@functools.cache
def _in_order(size: int, group: int, dtype: str) -> bytes:
    return (torch.arange(size) // (group or max(1, size))).to(DTYPES[dtype]).numpy().tobytes()


def own_head(checkpoint: Checkpoint) -> TensorInfo | None:
    """The checkpoint's `lm_head.weight`, if it has one that differs from the embedding."""
    head, embedding = (
        next((tensor for name, tensor in checkpoint.tensors.items() if name.endswith(end)), None)
        for end in ("lm_head.weight", "embed_tokens.weight")
    )
    return None if head is None or embedding is None or same_bytes(head, embedding) else head


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of one tensor, and where they go."""

    source: TensorInfo
    first: int
    """Element, not byte."""
    count: int
    places: tuple[Place, ...]
    """If it is not the whole tensor: one, flat, of `count` elements."""
    taken: Index = ()
    """Slices of the tensor that hold the `count` elements, where they lie apart; its places take from these."""

    @property
    def num_bytes(self) -> int:
        return self.count * DTYPES[self.source.dtype].itemsize

    @property
    def is_plain(self) -> bool:
        """Its bytes are the parameter's bytes."""
        target, take = self.places[0]
        plain = len(self.places) == 1 and take is None and not self.taken and target.is_contiguous()
        return plain and target.dtype == DTYPES[self.source.dtype]


@dataclass(frozen=True, slots=True)
class Span:
    """Parts that follow each other in a file."""

    file: Path
    begin: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def room(self) -> int:
        """Bytes it takes in a buffer."""
        return sum(_aligned(part.num_bytes) for part in self.parts)


def read_weights(
    parameters: Mapping[str, torch.Tensor],
    copies: Sequence[Copy],
    platform: Platform,
    progress: Progress | None = None,
    *,
    threads: int | None = None,
    limit: int = SPAN,
) -> int:
    """Fill parameters as `copies` (in file order) say; the number of bytes read. `limit`: bytes of a span."""
    spans = list(cut(parameters, copies, limit))
    total = sum(span.num_bytes for span in spans)
    if not spans:
        return 0
    reader = Reader(spans, platform)
    platform.synchronize()  # memory that was just taken may have been in use by work that is still on its way
    done = 0
    most = min(THREADS, os.cpu_count() or 1, BUFFERS // (2 * reader.room))
    pool = ThreadPoolExecutor(threads or max(2, most), "weights")
    try:
        for future in as_completed([pool.submit(reader.read, span) for span in spans]):
            done += future.result()
            if progress is not None:
                progress(done, total)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        reader.close()
    return total


def cut(parameters: Mapping[str, torch.Tensor], copies: Sequence[Copy], limit: int = SPAN) -> Iterator[Span]:
    """Spans of about `limit` bytes: small tensors together, large ones in pieces. What has no place is not read."""
    open_parts: list[Part] = []
    begin = end = num_bytes = 0
    for source, group in groupby((copy for copy in copies if copy.source.num_bytes), key=lambda copy: copy.source):
        wanted = tuple(group)
        if all(map(_lies_apart, wanted)):
            apart = [tuple(found) for _, found in groupby(wanted, key=lambda copy: copy.part)]
            if sum(_count(same[0]) for same in apart) < source.num_elements:
                for same in apart:
                    yield from _cut_apart(same, parameters, limit)
                continue
        places = tuple((parameters[copy.parameter][copy.index], taker(copy)) for copy in wanted)
        for part in _pieces(source, places, limit):
            at = source.begin + part.first * DTYPES[source.dtype].itemsize
            follows = open_parts and open_parts[-1].source.file == source.file and at == end
            if open_parts and not (follows and num_bytes + part.num_bytes <= limit and len(open_parts) < MOST_PARTS):
                yield Span(open_parts[0].source.file, begin, tuple(open_parts))
                open_parts, num_bytes = [], 0
            if not open_parts:
                begin = at
            open_parts.append(part)
            num_bytes += part.num_bytes
            end = at + part.num_bytes
    if open_parts:
        yield Span(open_parts[0].source.file, begin, tuple(open_parts))


def _lies_apart(copy: Copy) -> bool:
    """Whether a copy takes some rows and columns of its source."""
    slices = all(isinstance(taken, slice) for taken in copy.part)
    return bool(copy.part) and slices and copy.source.begin % DTYPES[copy.source.dtype].itemsize == 0


def _count(copy: Copy) -> int:
    """Elements of its source that it takes."""
    sizes = list(copy.source.shape)
    for dim, taken in enumerate(copy.part):
        assert isinstance(taken, slice)
        sizes[dim] = len(range(sizes[dim])[taken])
    return math.prod(sizes)


def _cut_apart(copies: Sequence[Copy], parameters: Mapping[str, torch.Tensor], limit: int) -> Iterator[Span]:
    """The span of copies of the same rows and columns; of rows that are copied as they are, spans of about `limit`
    bytes."""
    copy, source = copies[0], copies[0].source
    places = tuple((parameters[one.parameter][one.index], taker(replace(one, part=()))) for one in copies)
    if len(places) > 1 or places[0][1] is not None or copy.part[0] != slice(None):
        yield Span(source.file, source.begin, (Part(source, 0, _count(copy), places, copy.part),))
        return
    target, count = places[0][0], _count(copy) // source.shape[0]
    most = max(1, limit // (count * DTYPES[source.dtype].itemsize))
    for first in range(0, source.shape[0], most):
        rows = some_rows(source, first, min(first + most, source.shape[0]))
        place = target[first : first + most]
        yield Span(source.file, rows.begin, (Part(rows, 0, rows.shape[0] * count, ((place, None),), copy.part),))


def taker(copy: Copy) -> Take | None:
    """What a copy takes from its source."""
    convert, part, rest = copy.convert, copy.part, copy.rest
    if convert is None:
        return itemgetter(part) if any(taken != slice(None) for taken in part) else None
    return lambda source: convert(source[part])[rest]


def _pieces(source: TensorInfo, places: tuple[Place, ...], limit: int) -> Iterator[Part]:
    (target, take), *others = places
    if others or take or not target.is_contiguous() or source.num_bytes <= limit:
        yield Part(source, 0, source.num_elements, places)
        return
    flat, most = target.view(-1), limit // DTYPES[source.dtype].itemsize
    for first in range(0, source.num_elements, most):
        count = min(most, source.num_elements - first)
        yield Part(source, first, count, ((flat[first : first + count], None),))


class Reader:
    """Open files, and buffers of each thread."""

    def __init__(self, spans: Sequence[Span], platform: Platform) -> None:
        self.platform = platform
        self.room = max(span.room for span in spans)
        self.files: dict[Path, int] = {}
        self.mine = threading.local()
        """Of each thread: two stagings (none where the platform has none), else a buffer."""
        self.stagings: list[Staging] = []
        for span in spans:
            if span.file not in self.files:
                self.files[span.file] = os.open(span.file, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, span: Span) -> int:
        """Read it and see to it that it gets to its places; returns its bytes."""
        stagings = self._stagings()
        if stagings:
            staging = stagings[0]
            stagings.reverse()
            staging.wait()  # for what was copied from it the time before last
            for source, places in self._read_to(span, staging.buffer):
                staging.put(source, places)
        elif (part := span.parts[0]).taken:
            found = self._mapped(part)
            for target, take in part.places:
                target.copy_(found if take is None else take(found))
        elif all(part.is_plain for part in span.parts):
            self._fill(span, [_bytes_of(part.places[0][0]) for part in span.parts])
        else:
            if not hasattr(self.mine, "buffer"):
                self.mine.buffer = torch.empty(self.room, dtype=torch.uint8)
            for source, places in self._read_to(span, self.mine.buffer):
                for target, take in places:
                    target.copy_(source if take is None else take(source))
        return span.num_bytes

    def _stagings(self) -> list[Staging]:
        if not hasattr(self.mine, "stagings"):
            made = [self.platform.make_staging(self.room) for _ in range(2)]
            self.mine.stagings = [staging for staging in made if staging is not None]
            self.stagings += self.mine.stagings
        found: list[Staging] = self.mine.stagings
        return found

    def _read_to(self, span: Span, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[Place, ...]]]:
        """Read a span into a buffer: each tensor, and its places."""
        offset, sources = 0, []
        if (part := span.parts[0]).taken:
            found = self._mapped(part)
            source = buffer[: part.num_bytes].view(found.dtype).view(found.shape)
            yield source.copy_(found), part.places
            return
        for part in span.parts:
            source = buffer[offset : offset + part.num_bytes].view(DTYPES[part.source.dtype])
            sources.append(source if part.count < part.source.num_elements else source.view(part.source.shape))
            offset += _aligned(part.num_bytes)
        self._fill(span, [_bytes_of(source) for source in sources])
        for source, part in zip(sources, span.parts, strict=True):
            yield source, part.places

    def _mapped(self, part: Part) -> torch.Tensor:
        """Its elements in a mapping of the file, which lasts as long as the tensor."""
        source, file = part.source, self.files[part.source.file]
        if os.fstat(file).st_size < source.end:
            raise _shorter(source.file)
        start = source.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(file, source.end - start, access=mmap.ACCESS_COPY, offset=start)  # never written to
        mapping.madvise(mmap.MADV_WILLNEED)  # a disk reads all of it in one go: other ranks need the rest
        found = torch.frombuffer(mapping, dtype=torch.uint8, count=source.num_bytes, offset=source.begin - start)
        return found.view(DTYPES[source.dtype]).view(source.shape)[part.taken]

    def _fill(self, span: Span, targets: list[memoryview]) -> None:
        offset = span.begin
        while targets:
            count = os.preadv(self.files[span.file], targets, offset)
            if not count and any(target.nbytes for target in targets):
                raise _shorter(span.file)
            offset += count
            # A read may return fewer bytes: continue after them.
            while targets and count >= targets[0].nbytes:
                count -= targets.pop(0).nbytes
            if targets:
                targets[0] = targets[0][count:]

    def close(self) -> None:
        """When this returns, everything that was read is where it belongs."""
        for staging in self.stagings:
            staging.wait()
        for file in self.files.values():
            os.close(file)


def _shorter(file: Path) -> CheckpointError:
    return CheckpointError(f"{file}: became shorter while it was read; download it again")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, to be written to."""
    assert tensor.is_contiguous()
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
