"""Who trains a workload: ours and the peers, each set up the way its own documentation does.

Peers run on Gloo, as people run them on CPUs today, and a second time on the backend `shm`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.bench.groups import GLOO, SHM, Groups
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
    DDP_SHM = "ddp-shm"
    DDP_TUNED_SHM = "ddp-tuned-shm"
    ACCELERATE_SHM = "accelerate-shm"
    FSDP2_SHM = "fsdp2-shm"
    FSDP2_ZERO2_SHM = "fsdp2-zero2-shm"
    OURS_DP = "paceline-dp"
    OURS_FSDP = "paceline-fsdp"
    OURS_FSDP_ZERO2 = "paceline-fsdp-zero2"


OURS = (Contestant.OURS_DP, Contestant.OURS_FSDP, Contestant.OURS_FSDP_ZERO2)

ON_SHM: Mapping[Contestant, Contestant] = {
    Contestant.DDP_SHM: Contestant.DDP,
    Contestant.DDP_TUNED_SHM: Contestant.DDP_TUNED,
    Contestant.ACCELERATE_SHM: Contestant.ACCELERATE,
    Contestant.FSDP2_SHM: Contestant.FSDP2,
    Contestant.FSDP2_ZERO2_SHM: Contestant.FSDP2_ZERO2,
}
"""The peers on the backend `shm`, and who each of them is on Gloo."""

_ON_GLOO: Mapping[Contestant, Contestant] = {
    Contestant.SERIAL: Contestant.OURS_DP,
    Contestant.DDP: Contestant.OURS_DP,
    Contestant.DDP_TUNED: Contestant.OURS_DP,
    Contestant.DDP_SYNC_BATCH_NORM: Contestant.OURS_DP,
    Contestant.ACCELERATE: Contestant.OURS_DP,
    Contestant.FSDP2: Contestant.OURS_FSDP,
    Contestant.FSDP2_ZERO2: Contestant.OURS_FSDP_ZERO2,
}

OPPONENT: Mapping[Contestant, Contestant] = {
    **_ON_GLOO,
    **{shm: _ON_GLOO[gloo] for shm, gloo in ON_SHM.items()},
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


def backend_of(who: Contestant, ours: str) -> str:
    """Return the backend that a contestant runs on, where ours run on `ours`."""
    if who in OURS:
        return ours
    return SHM if who in ON_SHM else GLOO


def set_up(who: Contestant, workload: Workload, world: World, groups: Groups) -> Contender:
    """Return a contestant ready to train a module of its own; a collective. Ours uses the default group."""
    module, batch = workload.build()
    if who is Contestant.SERIAL:
        return plain(module, batch, workload)
    part = {name: value.chunk(world.size)[world.rank].contiguous() for name, value in batch.items()}
    if who in OURS:
        return _ours(who, module, batch, part, workload, world)
    group = groups.on(backend_of(who, ours=GLOO))
    match ON_SHM.get(who, who):
        case Contestant.DDP:
            return plain(nn.parallel.DistributedDataParallel(module, process_group=group), part, workload)
        case Contestant.DDP_TUNED:
            ddp = nn.parallel.DistributedDataParallel(
                module, process_group=group, gradient_as_bucket_view=True, static_graph=True
            )
            return plain(ddp, part, workload)
        case Contestant.DDP_SYNC_BATCH_NORM:
            convert = nn.SyncBatchNorm.convert_sync_batchnorm
            synchronised = convert(module, group)  # type: ignore[no-untyped-call]  # untyped in torch
            return plain(nn.parallel.DistributedDataParallel(synchronised, process_group=group), part, workload)
        case Contestant.ACCELERATE:
            return _accelerate(module, part, workload, group)
        case _ as sharded:
            return fsdp2(module, part, workload, group, keep=sharded is Contestant.FSDP2_ZERO2)


def _ours(who: Contestant, module: nn.Module, batch: Batch, part: Batch, workload: Workload, world: World) -> Contender:
    plan = {
        Contestant.OURS_DP: Plan(Mesh((("dp", world.size),))),
        Contestant.OURS_FSDP: Plan(Mesh((("fsdp", world.size),)), zero_stage=3),
        Contestant.OURS_FSDP_ZERO2: Plan(Mesh((("fsdp", world.size),)), zero_stage=2),
    }[who]
    ours = parallelize(module, batch, plan)
    return Contender(lambda: ours.local(**part), workload.optimizer(ours.parameters()), startup=ours.startups[0])


def plain(module: nn.Module, batch: Batch, workload: Workload) -> Contender:
    """Return a contestant that trains a module as anybody would."""
    return Contender(lambda: loss_of(module, batch), workload.optimizer(module.parameters()))


def _accelerate(module: nn.Module, part: Batch, workload: Workload, group: dist.ProcessGroup) -> Contender:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    class OnGroup(DistributedDataParallelKwargs):  # type: ignore[misc]  # untyped there
        """Has no field for the group, which is the default group unless DDP is told another."""

        def to_kwargs(self) -> dict[str, object]:
            return {**super().to_kwargs(), "process_group": group}

    accelerator = Accelerator(cpu=True)
    accelerator.ddp_handler = OnGroup()
    prepared, optimizer = accelerator.prepare(module, workload.optimizer(module.parameters()))
    return Contender(lambda: loss_of(prepared, part), optimizer, accelerator.backward)


def fsdp2(module: nn.Module, part: Batch, workload: Workload, group: dist.ProcessGroup, *, keep: bool) -> Contender:
    """Return FSDP2 for every block, then for the root; `keep` is its ZeRO-2."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for block in workload.blocks(module):
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
    # What is gathered for the root is needed first in the backward pass: FSDP2 keeps it by default.
    fully_shard(module, mesh=mesh)
    return plain(module, part, workload)


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    """Return the loss, whether a module gives it alone or in an object."""
    output = module(**batch)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def mean_over_ranks(loss: Tensor) -> float:
    """Return the mean of a loss over the ranks; a collective."""
    total = loss.detach().double().reshape(())
    total = total.to_local() if hasattr(total, "to_local") else total.clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
