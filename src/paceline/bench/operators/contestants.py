"""Who trains on split operators: ours on each mesh, and PyTorch's tensor parallelism, DDP and FSDP2.

Peers run on Gloo, as people run them on CPUs today, and a second time on the backend `shm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.bench.contestants import Contender, fsdp2, loss_of, plain
from paceline.bench.groups import GLOO, SHM, Groups
from paceline.bench.operators.tensor_parallel import Variant, loss_and_backward, parameter_groups, tensor_parallel
from paceline.bench.operators.workloads import Model
from paceline.bench.turns import SERIAL
from paceline.bench.workloads import Batch, Workload
from paceline.plan import Mesh, Plan
from paceline.runtime.job.world import World
from paceline.runtime.module import parallelize


class Contestant(StrEnum):
    """A way to train on some ranks."""

    SERIAL = SERIAL
    TP = "tp"
    TP_LOSS = "tp-loss"
    TP_SEQUENCE = "tp-sequence"
    FSDP2_TP = "fsdp2-tp"
    DDP = "ddp"
    FSDP2 = "fsdp2"
    TP_SHM = "tp-shm"
    TP_LOSS_SHM = "tp-loss-shm"
    TP_SEQUENCE_SHM = "tp-sequence-shm"
    FSDP2_TP_SHM = "fsdp2-tp-shm"
    DDP_SHM = "ddp-shm"
    FSDP2_SHM = "fsdp2-shm"
    OURS_TP = "paceline-tp"
    OURS_SP = "paceline-sp"
    OURS_HW = "paceline-hw"
    OURS_DP_TP = "paceline-dp-tp"
    OURS_FSDP_TP = "paceline-fsdp-tp"
    OURS_DP_HW = "paceline-dp-hw"


AXES: Mapping[Contestant, tuple[str, ...]] = {
    Contestant.OURS_TP: ("tp",),
    Contestant.OURS_SP: ("sp",),
    Contestant.OURS_HW: ("hw",),
    Contestant.OURS_DP_TP: ("dp", "tp"),
    Contestant.OURS_FSDP_TP: ("fsdp", "tp"),
    Contestant.OURS_DP_HW: ("dp", "hw"),
}
"""Ours, and the axes of their meshes."""

ON_SHM: Mapping[Contestant, Contestant] = {
    Contestant.TP_SHM: Contestant.TP,
    Contestant.TP_LOSS_SHM: Contestant.TP_LOSS,
    Contestant.TP_SEQUENCE_SHM: Contestant.TP_SEQUENCE,
    Contestant.FSDP2_TP_SHM: Contestant.FSDP2_TP,
    Contestant.DDP_SHM: Contestant.DDP,
    Contestant.FSDP2_SHM: Contestant.FSDP2,
}
"""The peers on the backend `shm`, and who each of them is on Gloo."""

PEERS = tuple(who for who in Contestant if who not in AXES)

VARIANTS: Mapping[Contestant, Variant] = {
    Contestant.TP: Variant.PAIRS,
    Contestant.TP_LOSS: Variant.LOSS,
    Contestant.TP_SEQUENCE: Variant.SEQUENCE,
    Contestant.FSDP2_TP: Variant.SEQUENCE,
}
"""The peers that split layers, and how far each follows PyTorch's tutorial."""


def ours(model: Model, ranks: int) -> tuple[Contestant, ...]:
    """Return those of ours that train a model on some ranks: on two axes from four ranks on."""
    two_axes = ranks >= 4 and ranks % 2 == 0
    match model:
        case Model.UNET:
            return (Contestant.OURS_HW, Contestant.OURS_DP_HW if two_axes else Contestant.OURS_TP)
        case Model.RESNET:  # small images, many channels
            return (Contestant.OURS_TP, Contestant.OURS_DP_TP if two_axes else Contestant.OURS_HW)
    if two_axes:
        return (Contestant.OURS_TP, Contestant.OURS_DP_TP, Contestant.OURS_FSDP_TP)
    return (Contestant.OURS_TP, Contestant.OURS_SP)


def can_train(peer: Contestant, model: Model, ranks: int) -> bool:
    """Whether a peer can express a model on some ranks at all."""
    peer = ON_SHM.get(peer, peer)
    if peer is Contestant.FSDP2_TP and Contestant.OURS_FSDP_TP not in ours(model, ranks):
        return False
    return peer not in VARIANTS or model.has_tensor_parallel


def opponent(peer: Contestant, model: Model, ranks: int) -> Contestant:
    """Return which of ours a peer is compared with: the one of its own mesh, or else the first that uses all axes."""
    match ON_SHM.get(peer, peer):
        case Contestant.TP | Contestant.TP_LOSS | Contestant.TP_SEQUENCE:
            return Contestant.OURS_TP
        case Contestant.FSDP2_TP:
            return Contestant.OURS_FSDP_TP
    candidates = ours(model, ranks)
    return next((who for who in candidates if len(AXES[who]) > 1), candidates[0])


def backend_of(who: Contestant, ours: str) -> str:
    """Return the backend that a contestant runs on, where ours run on `ours`."""
    if who in AXES:
        return ours
    return SHM if who in ON_SHM else GLOO


def mesh_of(who: Contestant, ranks: int) -> Mesh:
    """Return the mesh of one of ours; of two axes, the outer one has two ranks."""
    axes = AXES[who]
    return Mesh(((axes[0], ranks),) if len(axes) == 1 else ((axes[0], 2), (axes[1], ranks // 2)))


def set_up(who: Contestant, workload: Workload, world: World, groups: Groups) -> Contender:
    """Return a contestant ready to train a module of its own; a collective. Ours uses the default group."""
    module, batch = workload.build()
    if who is Contestant.SERIAL:
        return plain(module, batch, workload)
    if who in AXES:
        placed = parallelize(module, batch, Plan(mesh_of(who, world.size)))
        return Contender(lambda: placed(**batch), workload.optimizer(placed.parameters()), startup=placed.startups[0])
    backend = backend_of(who, ours=GLOO)
    peer = ON_SHM.get(who, who)
    if peer is Contestant.FSDP2_TP:
        return _fsdp2_tp(module, batch, workload, world, backend)
    group = groups.on(backend)
    if peer in VARIANTS:
        return _tp(module, batch, workload, DeviceMesh.from_group(group, "cpu"), VARIANTS[peer])
    part = _part(batch, world.rank, world.size)
    if peer is Contestant.DDP:
        return plain(nn.parallel.DistributedDataParallel(module, process_group=group), part, workload)
    return fsdp2(module, part, workload, group, keep=False)


def _tp(module: nn.Module, batch: Batch, workload: Workload, mesh: DeviceMesh, variant: Variant) -> Contender:
    split = tensor_parallel(module, mesh, variant)
    loss, backward = loss_and_backward(lambda: loss_of(split, batch), variant)
    return Contender(loss, workload.optimizer(parameter_groups(split)), backward)


def _fsdp2_tp(module: nn.Module, batch: Batch, workload: Workload, world: World, backend: str) -> Contender:
    """PyTorch's tutorial on two axes: layers are split along the inner one, and FSDP2 is over the outer one."""
    from torch.distributed.fsdp import fully_shard

    names = ("dp", "tp")
    mesh = init_device_mesh(
        "cpu", (2, world.size // 2), mesh_dim_names=names, backend_override=dict.fromkeys(names, backend)
    )
    variant = VARIANTS[Contestant.FSDP2_TP]
    split = tensor_parallel(module, mesh["tp"], variant)
    for block in workload.blocks(split):
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(split, mesh=mesh["dp"])
    part = _part(batch, dist.get_rank(mesh.get_group("dp")), 2)
    loss, backward = loss_and_backward(lambda: loss_of(split, part), variant)
    return Contender(loss, workload.optimizer(parameter_groups(split)), backward)


def _part(batch: Batch, index: int, parts: int) -> Batch:
    return {name: value.chunk(parts)[index].contiguous() for name, value in batch.items()}
