"""The state of a `torch.optim` optimizer by parameter name, in pieces, for any layout.

A state tensor of its parameter's local shape is split as the parameter is; a state of one element, such as `step`, is
the same everywhere. Groups are known by the names of their parameters, so their order means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.placement.boxes import Box, Patch
from paceline.train.checkpoint.manifest import Manifest
from paceline.train.checkpoint.pieces import Held, ShardedModule, ShardLike
from paceline.train.checkpoint.plain import plain

# How an optimizer computes, not what: these stay as the running optimizer has them.
_MEANS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def state_key(name: str, key: str) -> str:
    """Return the name in a checkpoint of the state `key` of the parameter `name`."""
    return f"optimizer/{key}/{name}"


def known_parameters(module: ShardedModule, optimizer: Optimizer) -> list[ShardLike]:
    """Return the shards that the optimizer trains.

    Raises:
        CheckpointError: the optimizer has a parameter that is no shard of the module.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    shards = [shard for shard in module.shards() if shard.is_parameter and id(shard.tensor) in trained]
    strangers = len(trained) - len({id(shard.tensor) for shard in shards})
    if strangers:
        raise CheckpointError(
            f"{strangers} of {len(trained)} parameters of the optimizer are not the module's. Build the optimizer from "
            "module.parameters() of the module that paceline.parallelize returned."
        )
    return shards


def optimizer_pieces(module: ShardedModule, optimizer: Optimizer) -> list[Held]:
    """Return the pieces of the optimizer's state tensors that live in this process.

    Raises:
        CheckpointError: a state tensor is neither of its parameter's shape nor the same on all ranks.
    """
    pieces = []
    for shard in known_parameters(module, optimizer):
        local = tuple(shard.tensor.shape)
        for key, value in optimizer.state.get(shard.tensor, {}).items():
            if not isinstance(value, Tensor):
                continue
            shape = tuple(value.shape)
            if shape == local:
                held = Held(
                    state_key(shard.name, key), shard.rank, value, shard.patches, tuple(shard.shape), shard.owner
                )
            elif value.numel() == 1 or local == tuple(shard.shape):
                # Equal on all ranks: the owner of the piece at the origin writes it.
                owner = shard.owner and shard.patches[0].whole.at_origin
                held = Held(state_key(shard.name, key), shard.rank, value, (Patch.all_of(shape),), shape, owner)
            else:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps '{key}' of shape {list(shape)} for the piece {list(local)} of "
                    f"'{shard.name}' {list(shard.shape)}; a sharded parameter may have state of its own shape or of "
                    "one element only. Use another optimizer, or the mesh axis 'dp'."
                )
            pieces.append(held)
    return pieces


def describe(module: ShardedModule, optimizer: Optimizer) -> dict[str, Any]:
    """Return, as plain values, the groups with their hyper-parameters and the state of each parameter.

    Returns:
        `groups`: parameter names and hyper-parameters of each; `state`: for each parameter name the names of its
        state tensors and the values that are no tensors.

    Raises:
        CheckpointError: a value is neither a tensor nor plain.
    """
    names = {id(shard.tensor): shard.name for shard in known_parameters(module, optimizer)}
    state: dict[str, Any] = {}
    for shard in known_parameters(module, optimizer):
        values = optimizer.state.get(shard.tensor, {})
        tensors = sorted(key for key, value in values.items() if isinstance(value, Tensor))
        others = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        state[shard.name] = {"tensors": tensors, "values": plain(others, f"optimizer state of '{shard.name}'")}
    groups = []
    for group in optimizer.param_groups:
        hyper = {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in _MEANS
        }
        members = sorted({names[id(parameter)] for parameter in group["params"]})
        groups.append({"names": members, "hyper": plain(hyper, "hyper-parameters of the optimizer")})
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}


def misfits(manifest: Manifest, module: ShardedModule, optimizer: Optimizer) -> list[str]:
    """Return why the saved optimizer state does not fit `optimizer`; nothing when it does."""
    saved = manifest.optimizer
    faults = []
    if saved["class"] != type(optimizer).__name__:
        faults.append(f"optimizer {type(optimizer).__name__}: the checkpoint has the state of {saved['class']}")
    groups = {_held(group["names"], module) for group in saved["groups"]}
    for group in describe(module, optimizer)["groups"]:
        if tuple(group["names"]) not in groups:
            faults.append(
                f"parameter group of {_shown(group['names'])}: the checkpoint has no group of just these; its groups: "
                + "; ".join(_shown(names) for names in sorted(groups))
            )
    for shard in known_parameters(module, optimizer):
        for key in saved["state"].get(shard.name, {"tensors": []})["tensors"]:
            shape = manifest.tensors[state_key(shard.name, key)].spec.shape
            if shape != tuple(shard.shape) and Box.whole(shape).size != 1 and shard.tensor.shape != shard.shape:
                faults.append(f"'{shard.name}': its state '{key}' of shape {list(shape)} cannot be sharded")
    return faults


def _held(names: Sequence[str], module: ShardedModule) -> tuple[str, ...]:
    """Return those names of a group that this process has parameters of: all but for those of other stages."""
    here = {shard.name for shard in module.shards() if shard.is_parameter}
    return tuple(name for name in names if name in here or module.mesh.stage_ranks == 1)


def prepare(manifest: Manifest, module: ShardedModule, optimizer: Optimizer) -> list[Held]:
    """Set hyper-parameters and plain state, and return the state tensors to be filled from the checkpoint.

    State that the checkpoint does not have is dropped; tensors that do not exist yet are created, on the parameter's
    device but for `step`, which lives on the CPU unless the group is capturable or fused (as torch.optim does it).
    """
    saved = manifest.optimizer
    hyper = {_held(group["names"], module): group["hyper"] for group in saved["groups"]}
    shards = {id(shard.tensor): shard for shard in known_parameters(module, optimizer)}
    targets = []
    for group in optimizer.param_groups:
        members = sorted({shards[id(parameter)].name for parameter in group["params"]})
        _set_hyper(group, hyper[tuple(members)])
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            shard = shards[id(parameter)]
            known = saved["state"].get(shard.name, {"tensors": [], "values": {}})
            state = dict(known["values"])
            for key in known["tensors"]:
                device = torch.device("cpu") if key == "step" and not on_device else parameter.device
                held = _target(manifest, shard, key, optimizer.state[parameter].get(key), device)
                state[key] = held.tensor
                targets.append(held)
            optimizer.state[parameter] = state
            if not state:
                del optimizer.state[parameter]  # as before the first step
    return targets


def _target(manifest: Manifest, shard: ShardLike, key: str, existing: object, device: torch.device) -> Held:
    """Return the piece of a state tensor that `shard` needs, reusing the tensor that is there when it fits."""
    name = state_key(shard.name, key)
    spec = manifest.tensors[name].spec
    is_split = spec.shape == tuple(shard.shape)
    patches = shard.patches if is_split else (Patch.all_of(spec.shape),)
    local = tuple(shard.tensor.shape) if is_split else spec.shape
    if isinstance(existing, Tensor) and tuple(existing.shape) == local and existing.dtype == spec.dtype:
        tensor = existing
    else:
        tensor = torch.empty(local, dtype=spec.dtype, device=device)
    return Held(name, shard.rank, tensor, patches, spec.shape, shard.owner)


def _set_hyper(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Take over hyper-parameters in place; tensors and tuples stay tensors and tuples."""
    for key, value in saved.items():
        current = group.get(key)
        if isinstance(current, Tensor):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _shown(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
