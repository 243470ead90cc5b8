"""What all ranks must agree on comes from rank 0."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_from_rank_zero_(tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor with rank 0's, in place; does nothing without a process group."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    on_gpu = dist.get_backend() == "nccl"
    for tensor in tensors:
        # Collectives know no bool; NCCL knows no CPU tensors.
        buffer = tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor.contiguous()
        if on_gpu and not buffer.is_cuda:
            buffer = buffer.cuda()
        dist.broadcast(buffer, src=0)
        tensor.copy_(buffer)
