"""A parallel module of one rank, as small as can be: what the loop needs of one, around a plain module."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    name: str
    rank: int
    tensor: Tensor
    is_parameter: bool
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    owner: bool = True


class Serial(nn.Module):
    """Masked token losses weigh by their valid targets (-100 is none), others by their samples."""

    input_shard = (0, 1)
    ranks = (0,)

    def __init__(self, module: nn.Module):
        super().__init__()
        self.user = module
        self.last_weight = 0.0
        self._seed = 0

    def seed(self, value: int) -> None:
        self._seed = value

    def local(self, **batch: Tensor) -> Tensor:
        torch.manual_seed(self._seed)
        self.last_weight = float((batch["y"] != -100).sum())
        return self.user(**batch)

    whole = local

    def clip_grad_norm_(self, most: float) -> Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        if torch.isfinite(norm) and norm > most:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.mul_(most / norm)
        return norm

    def shards(self) -> Iterator[Shard]:
        for name, p in self.user.named_parameters():
            yield Shard(name, 0, p, True, tuple(p.shape), (0,) * p.dim())
