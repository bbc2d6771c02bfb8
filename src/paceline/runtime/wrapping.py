"""What wraps a module for `runtime.fallback`: DDP, FSDP2, or nothing where there is one rank.

The only file that uses private interfaces of FSDP2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PlanError
from paceline.placement.boxes import Patch
from paceline.placement.placements import Shape
from paceline.plan import Axis, Mesh, Plan
from paceline.program.capture import LossOf

_DP, _FSDP = Axis.DP.value, Axis.FSDP.value


@dataclass(frozen=True)
class Held:
    """A parameter as this rank holds it; for the fields, see `runtime.state.Shard`.

    `whole` gathers the parameter; a collective.
    """

    tensor: nn.Parameter
    shape: Shape
    patches: tuple[Patch, ...]
    owner: bool
    whole: Callable[[], Tensor]


@dataclass(frozen=True)
class Wrapped:
    """The user's module, and what calls it so that gradients are averaged over ranks."""

    user: nn.Module
    call: Callable[..., Tensor]
    parameters: Mapping[str, Held]


def unwrapped(root: LossOf, rank: int) -> Wrapped:
    """Return the module of the only rank as it is."""
    return Wrapped(root.module, root.__call__, _replicated(root.module, rank))


def ddp(root: LossOf, plan: Plan, rank: int) -> Wrapped:
    """Wrap what returns the loss: DDP finds its way back from a plain tensor, not from any object of a user's.

    Control flow may depend on the data, so any parameter may go unused on any rank.
    """
    wrapped = DistributedDataParallel(
        root,
        forward_sync_buffers=False,
        init_sync=False,
        find_unused_parameters=True,
        bucket_cap_mb=plan.bucket_bytes / 2**20,
    )
    return Wrapped(root.module, wrapped.__call__, _replicated(root.module, rank))


def _replicated(module: nn.Module, rank: int) -> dict[str, Held]:
    return {
        name: Held(parameter, tuple(parameter.shape), (Patch.all_of(parameter.shape),), rank == 0, parameter.detach)
        for name, parameter in module.named_parameters()
    }


def fsdp2(root: LossOf, plan: Plan, rank: int) -> Wrapped:
    """Shard the repeated children of the module and then the rest, hybrid where the mesh has an axis `dp` too.

    Raises:
        PlanError: a parameter has no dimension to split.
    """
    user, where = root.module, plan.mesh.coordinate(rank)
    for name, parameter in user.named_parameters():
        if parameter.ndim == 0:
            raise PlanError(
                f"FSDP2 cannot split parameter '{name}': it has no dimensions. Give it the shape (1,), or use "
                f"fallback 'ddp' with the mesh 'dp={plan.mesh.size}'."
            )
    mesh = _device_mesh(plan.mesh, next(user.parameters()).device.type)
    keep = plan.zero_stage == 2
    units: list[nn.Module] = _units(user)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=not keep)
    # The backward pass needs first what was gathered for the root, so FSDP2 keeps it by default.
    fully_shard(root, mesh=mesh, reshard_after_forward=False if keep else None)
    wrapped = [module for module in (*units, root) if isinstance(module, FSDPModule)]
    for module in wrapped:
        module.set_reduce_scatter_unused_params(True, recurse=False)

    def call(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = root(*args, **kwargs)
        if not torch.is_grad_enabled():  # no backward pass will free what is gathered
            for module in wrapped:
                module.reshard()
        return loss

    replica = all(index == 0 for axis, index in where.items() if axis != _FSDP)
    held = {}
    for name, parameter in user.named_parameters():
        assert isinstance(parameter, DTensor)
        shape = tuple(parameter.shape)
        extent, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        owner = replica and (where[_FSDP] == 0 or 0 not in extent)
        patch = Patch.single(offset, extent)
        held[name] = Held(_local(parameter), shape, (patch,), owner, parameter.full_tensor)
    return Wrapped(user, call, held)


def _local(parameter: DTensor) -> nn.Parameter:
    """Return the local piece as a plain parameter: it shares the memory, and gets the gradients.

    FSDP2 leaves gradients on its own distributed parameter; optimizers and checkpoints here know plain pieces only.
    """
    local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)

    def hand_over(distributed: Tensor) -> None:
        assert isinstance(distributed.grad, DTensor)
        gradient = distributed.grad.to_local()
        distributed.grad = None
        local.grad = gradient if local.grad is None else local.grad.add_(gradient)

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]  # untyped in torch
    return local


def _units(module: nn.Module) -> list[nn.Module]:
    """Return the repeated parts: children of the outermost `ModuleList`s that share no parameter with anything else."""
    uses = _uses(module)
    parts = dict.fromkeys(part for parts in _outermost_lists(module) for part in parts)
    return [
        part
        for part in parts
        if (own := _uses(part))
        and type(part).forward is not nn.Module.forward
        and all(uses[key] == count for key, count in own.items())
    ]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _uses(module: nn.Module) -> Counter[int]:
    """Count in how many places each parameter is."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Return the axes that have several ranks, in the order in which FSDP2 reads them: replicated, then split."""
    ranks = torch.arange(mesh.size).reshape([size for _, size in mesh.axes])
    names = [axis for axis in (_DP, _FSDP) if axis in mesh.names]
    ranks = ranks.permute([mesh.names.index(axis) for axis in names])
    kept = [axis for axis in names if mesh[axis] > 1]
    return DeviceMesh(device_type, ranks.reshape([mesh[axis] for axis in kept]), mesh_dim_names=tuple(kept))
