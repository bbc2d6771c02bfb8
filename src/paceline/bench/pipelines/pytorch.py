"""`torch.distributed.pipelining` as its documentation has it: stages by hand, and one of its schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.nn import functional as F

from paceline.bench.workloads import GPT, Batch
from paceline.schedule import Kind

_ONE_STAGE: Mapping[Kind, Any] = {Kind.GPIPE: ScheduleGPipe, Kind.ONE_F_ONE_B: Schedule1F1B}
_SEVERAL: Mapping[Kind, tuple[Any, int]] = {
    Kind.INTERLEAVED: (ScheduleInterleaved1F1B, 2),
    Kind.ZB_H1: (ScheduleInterleavedZeroBubble, 1),  # ZB-H1 with one stage per rank
    Kind.ZB_V: (ScheduleZBVZeroBubble, 2),
}


def has(kind: Kind) -> bool:
    """Whether torch has such a schedule."""
    return kind in _ONE_STAGE or kind in _SEVERAL


class TorchPipeline:
    """The stages of this rank, and the schedule that runs them.

    Args:
        module: cut into stages of equally many layers.
        batch: which every rank is given whole.
        kind: of schedule.
        micro_batches: into which the batch is cut.
        group: of all ranks.
    """

    def __init__(self, module: GPT, batch: Batch, kind: Kind, micro_batches: int, group: dist.ProcessGroup) -> None:
        rank, self._ranks = group.rank(), group.size()
        kinds, chunks = (_ONE_STAGE[kind], 1) if kind in _ONE_STAGE else _SEVERAL[kind]
        count = chunks * self._ranks
        own = [rank + chunk * self._ranks for chunk in range(chunks)]
        if kind is Kind.ZB_V:
            own = [rank, count - 1 - rank]
        modules = [StageModule(module, index, count) for index in own]
        device = torch.device("cpu")
        stages = [
            PipelineStage(part, index, count, device, group=group) for part, index in zip(modules, own, strict=True)
        ]
        self.parameters = [parameter for part in modules for parameter in part.parameters()]
        self._schedule = kinds(stages[0] if kind in _ONE_STAGE else stages, micro_batches, loss_fn=_loss)
        self._is_first, self._is_last = 0 in own, count - 1 in own
        self._batch = batch

    def step(self) -> Tensor:
        """Run forward and backward passes; return what has the loss for its mean over the ranks."""
        given = [self._batch["tokens"]] if self._is_first else []
        if not self._is_last:
            self._schedule.step(*given)
            return torch.zeros(())
        losses: list[Tensor] = []
        self._schedule.step(*given, target=self._batch["targets"], losses=losses, return_outputs=False)
        return torch.stack(losses).detach().mean() * self._ranks


class StageModule(nn.Module):
    """Some layers of a GPT; the first stage has the embeddings too, the last one the head."""

    def __init__(self, gpt: GPT, index: int, count: int) -> None:
        super().__init__()
        layers = len(gpt.blocks)
        self.blocks = gpt.blocks[index * layers // count : (index + 1) * layers // count]
        self.embeddings = nn.ModuleList([gpt.token, gpt.position] if index == 0 else [])
        self.ending = nn.Sequential(*([gpt.norm, gpt.head] if index == count - 1 else []))

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens [B, T] of the first stage, [B, T, D] of others; returns logits from the last one."""
        if self.embeddings:
            token, position = self.embeddings
            x = token(x) + position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        ended: Tensor = self.ending(x)
        return ended


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
