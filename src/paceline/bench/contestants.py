"""Who trains a workload: ours and the peers, each set up the way its own documentation does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.bench.workloads import Batch, Workload
from paceline.plan import Mesh, Plan
from paceline.runtime.job.world import World
from paceline.runtime.module import parallelize
from paceline.runtime.planning import Startup


class Contestant(StrEnum):
    """A way to train on some ranks."""

    SERIAL = "serial"
    DDP = "ddp"
    DDP_TUNED = "ddp-tuned"
    DDP_SYNC_BATCH_NORM = "ddp-sync-batch-norm"
    ACCELERATE = "accelerate"
    FSDP2 = "fsdp2"
    FSDP2_ZERO2 = "fsdp2-zero2"
    OURS_DP = "paceline-dp"
    OURS_FSDP = "paceline-fsdp"
    OURS_FSDP_ZERO2 = "paceline-fsdp-zero2"


OURS = (Contestant.OURS_DP, Contestant.OURS_FSDP, Contestant.OURS_FSDP_ZERO2)

OPPONENT = {
    Contestant.SERIAL: Contestant.OURS_DP,
    Contestant.DDP: Contestant.OURS_DP,
    Contestant.DDP_TUNED: Contestant.OURS_DP,
    Contestant.DDP_SYNC_BATCH_NORM: Contestant.OURS_DP,
    Contestant.ACCELERATE: Contestant.OURS_DP,
    Contestant.FSDP2: Contestant.OURS_FSDP,
    Contestant.FSDP2_ZERO2: Contestant.OURS_FSDP_ZERO2,
}
"""Each peer, and which of ours it is compared with: the one that lays out the parameters in the same way."""


@dataclass(frozen=True)
class Contender:
    """A contestant, set up on this rank.

    Attributes:
        loss: the forward pass on this rank's part of the batch.
        optimizer: over the parameters of this rank.
        backward: the backward pass from the loss.
        startup: seconds that ours took to plan.
    """

    loss: Callable[[], Tensor]
    optimizer: Optimizer
    backward: Callable[[Tensor], None] = Tensor.backward
    startup: Startup | None = None

    def step(self) -> tuple[Tensor, float]:
        """Train one step; return the loss, and how long the optimizer took in seconds."""
        loss = self.loss()
        self.backward(loss)
        began = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), time.perf_counter() - began


def set_up(who: Contestant, workload: Workload, world: World) -> Contender:
    """Return a contestant ready to train a module of its own; a collective."""
    module, batch = workload.build()
    if who is Contestant.SERIAL:
        return _plain(module, batch, workload)
    part = {name: value.chunk(world.size)[world.rank].contiguous() for name, value in batch.items()}
    match who:
        case Contestant.DDP:
            return _plain(nn.parallel.DistributedDataParallel(module), part, workload)
        case Contestant.DDP_TUNED:
            ddp = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True)
            return _plain(ddp, part, workload)
        case Contestant.DDP_SYNC_BATCH_NORM:
            convert = nn.SyncBatchNorm.convert_sync_batchnorm
            synchronised = convert(module)  # type: ignore[no-untyped-call]  # untyped in torch
            return _plain(nn.parallel.DistributedDataParallel(synchronised), part, workload)
        case Contestant.ACCELERATE:
            return _accelerate(module, part, workload)
        case Contestant.FSDP2 | Contestant.FSDP2_ZERO2:
            return _fsdp2(module, part, workload, world, keep=who is Contestant.FSDP2_ZERO2)
    plan = {
        Contestant.OURS_DP: Plan(Mesh((("dp", world.size),))),
        Contestant.OURS_FSDP: Plan(Mesh((("fsdp", world.size),)), zero_stage=3),
        Contestant.OURS_FSDP_ZERO2: Plan(Mesh((("fsdp", world.size),)), zero_stage=2),
    }[who]
    ours = parallelize(module, batch, plan)
    return Contender(lambda: ours.local(**part), workload.optimizer(ours.parameters()), startup=ours.startups[0])


def _plain(module: nn.Module, batch: Batch, workload: Workload) -> Contender:
    return Contender(lambda: _loss(module, batch), workload.optimizer(module.parameters()))


def _accelerate(module: nn.Module, part: Batch, workload: Workload) -> Contender:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(module, workload.optimizer(module.parameters()))
    return Contender(lambda: _loss(prepared, part), optimizer, accelerator.backward)


def _fsdp2(module: nn.Module, part: Batch, workload: Workload, world: World, *, keep: bool) -> Contender:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in workload.blocks(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
    # What is gathered for the root is needed first in the backward pass: FSDP2 keeps it by default.
    fully_shard(module, mesh=mesh)
    return _plain(module, part, workload)


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    output = module(**batch)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def mean_over_ranks(loss: Tensor) -> float:
    """Return the mean of a loss over the ranks; a collective."""
    total = loss.detach().double().reshape(())
    total = total.to_local() if hasattr(total, "to_local") else total.clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
