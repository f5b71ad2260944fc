"""All-reduce of small tensors in one kernel: each rank reads what the others have put into memory that all can read.

Over torch's symmetric memory. Two ranks on one GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
"""

import contextlib

import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (2, 4, 8)
"""Numbers of ranks that the kernel is made for."""
ALIGNMENT = 16
"""Of the tensors' bytes: what a thread reads at a time."""


class SymmetricMemory:
    """A buffer of this rank that the others read. The kernel waits for all ranks before it reads and before it ends, so
    the next call may write to the buffer; the sums are in the order of ranks, and the same bits on each."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.group_name = group.group_name
        self.buffer = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self.handle, self.rank = symmetric.rendezvous(self.buffer, group), group.rank()
        pads = (self.handle.get_signal_pad(rank, dtype=torch.int32) for rank in range(group.size()))
        self.pads = [pad.view(-1, group.size()) for pad in pads]
        self.stream = torch.cuda.Stream(device, priority=-1)  # shares no queue with streams whose kernels wait
        self.release(0)  # all are 0; a kernel's first launch may wait for the device, later ones do not

    def takes(self, x: torch.Tensor) -> bool:
        return x.nbytes <= self.buffer.nbytes and x.nbytes % ALIGNMENT == 0 and x.dtype in DTYPES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        shared.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self.group_name)  # type: ignore[no-any-return]

    def release(self, sent: int = 1) -> bool:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            signal_for_others(self.pads, self.rank, sent)
        self.stream.synchronize()
        return torch.cuda.default_stream(self.stream.device).query()


def signal_for_others(pads: list[torch.Tensor], rank: int, sent: int) -> None:
    """Do what a kernel of `rank` waits for. Its blocks set a signal from 0 to 1 in the pad of every rank, [block, this
    rank], and then one in its own from 1 to 0, [block, that rank]; those from itself to itself need no other."""
    for other, pad in enumerate(pads):
        if other != rank:
            pad[:, rank].fill_(0)
            pads[rank][:, other].fill_(sent)


def make(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> SymmetricMemory | None:
    """None, on all ranks, where one of them cannot read the memory of the others."""
    if group.size() not in SIZES or num_bytes == 0:
        return None
    made = None
    with contextlib.suppress(RuntimeError):  # no direct access between two devices
        made = SymmetricMemory(group, -(-num_bytes // ALIGNMENT) * ALIGNMENT, device)
    good = torch.tensor([int(made is not None)], device=device)
    dist.all_reduce(good, dist.ReduceOp.MIN, group=group)
    return made if good.item() else None
