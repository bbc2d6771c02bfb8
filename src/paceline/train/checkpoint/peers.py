"""The other processes of the job, for the moments when they may talk: construction and restoring, never saving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.errors import CheckpointError
from paceline.train.checkpoint.pieces import ShardedModule


@dataclass(frozen=True)
class Peers:
    """The processes that hold the ranks of a module.

    Attributes:
        index: which of them this is; 0 holds mesh rank 0.
        count: how many there are; 1 when all ranks live in this one.
    """

    index: int
    count: int

    @classmethod
    def of(cls, module: ShardedModule) -> Peers:
        """Find out who else holds ranks of `module`.

        Raises:
            CheckpointError: other processes must hold ranks, but there is no process group.
        """
        if len(module.ranks) == module.mesh.size:
            return cls(0, 1)
        if not dist.is_initialized():
            raise CheckpointError(
                f"this process holds {len(module.ranks)} of {module.mesh.size} ranks, but torch.distributed is not "
                "initialized; start all ranks with 'paceline train' or torchrun."
            )
        return cls(dist.get_rank(), dist.get_world_size())

    def from_first(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the first process on all of them. A collective."""
        if self.count == 1:
            return list(numbers)
        length = torch.tensor([len(numbers)], device=_device())
        dist.broadcast(length, src=0)
        shared = torch.zeros(int(length.item()), dtype=torch.int64, device=_device())
        if self.index == 0:
            shared.copy_(torch.tensor(list(numbers), dtype=torch.int64))
        dist.broadcast(shared, src=0)
        return [int(number) for number in shared.tolist()]

    def all_true(self, mine: bool) -> bool:
        """Return whether `mine` is true in every process. A collective."""
        if self.count == 1:
            return mine
        flag = torch.tensor([int(mine)], device=_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())


def _device() -> torch.device:
    """Return where the default group's backend wants tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
