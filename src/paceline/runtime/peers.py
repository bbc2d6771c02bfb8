"""How the ranks of one program, wherever they live, find and talk to each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from paceline import errors
from paceline.errors import PacelineError, PlanError
from paceline.plan import Mesh
from paceline.program.serialize import Json
from paceline.runtime.binding import AxisGroup
from paceline.runtime.direct import let_compute_go_first
from paceline.runtime.executor import Executor, ProcessExecutor
from paceline.runtime.inprocess import InProcessExecutor

Stored = tuple[dict[str, Json], dict[str, Tensor]]


@dataclass(frozen=True)
class Peers:
    """The ranks of this process and the way to the others.

    Attributes:
        executor: runs graphs for the ranks here.
        devices: the device of each rank here.
        leads: whether this process holds rank 0, which plans for all.
        alone: whether all ranks live in this process.
        groups: the ranks along each axis that the one here talks to; none where all live in this process.
    """

    executor: Executor
    devices: tuple[torch.device, ...]
    leads: bool
    alone: bool
    groups: Mapping[str, AxisGroup] = field(default_factory=dict)

    def from_leader(self, make: Callable[[], Stored]) -> Stored:
        """Return what `make` gives on rank 0. An error of rank 0 is raised on every rank, as the same class."""
        if self.alone:
            return make()
        if not self.leads:
            error, message, data, constants = self._receive()
            if error:
                raise _error_class(error)(f"rank 0 could not plan the program: {message}")
            return data, constants
        try:
            data, constants = make()
        except PacelineError as error:
            self._send({"error": type(error).__name__, "message": str(error)}, {})
            raise
        self._send({"step": data}, constants)
        return data, constants

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor by that of rank 0."""
        if not self.alone:
            dist.broadcast(tensor, src=0)

    def _send(self, data: dict[str, Json], constants: dict[str, Tensor]) -> None:
        for content in (json.dumps(data).encode(), safetensors.torch.save(_dense(constants))):
            payload = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.devices[0])
            dist.broadcast(torch.tensor([len(content)], device=self.devices[0]), src=0)
            dist.broadcast(payload, src=0)

    def _receive(self) -> tuple[str, str, dict[str, Json], dict[str, Tensor]]:
        contents = []
        for _ in range(2):
            size = torch.zeros(1, dtype=torch.long, device=self.devices[0])
            dist.broadcast(size, src=0)
            payload = torch.empty(int(size), dtype=torch.uint8, device=self.devices[0])
            dist.broadcast(payload, src=0)
            contents.append(payload.cpu().numpy().tobytes())
        data = json.loads(contents[0])
        return data.get("error", ""), data.get("message", ""), data.get("step", {}), safetensors.torch.load(contents[1])


def _error_class(name: str) -> type[PacelineError]:
    """Return the error of `paceline.errors` that rank 0 named."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, PacelineError) else PlanError


def _dense(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def connect(mesh: Mesh, device: torch.device, *, compile: bool) -> Peers:
    """Return the peers of this process under `torch.distributed`, or those of the only rank.

    Raises:
        PlanError: the mesh does not have as many ranks as the job.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != mesh.size:
        raise PlanError(
            f"mesh {mesh} has {mesh.size} ranks, but this job has {size}. Start it with `torchrun --nproc-per-node "
            f"{mesh.size}` and call torch.distributed.init_process_group first, choose a mesh of {size}, or give "
            "devices=[...] to run all ranks in this process."
        )
    rank = dist.get_rank() if size > 1 else 0
    groups: dict[str, AxisGroup] = {}
    if size > 1:
        sizes = tuple(length for _, length in mesh.axes)
        device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=mesh.names)
        where = mesh.coordinate(rank)
        found = {axis: device_mesh.get_group(axis) for axis in mesh.names}
        groups = {axis: AxisGroup(group.group_name, where[axis], group) for axis, group in found.items()}
        let_compute_go_first()
    executor = ProcessExecutor(rank, groups, mesh=mesh, compile=compile)
    return Peers(executor, (device,), leads=rank == 0, alone=size == 1, groups=groups)


def in_process(mesh: Mesh, devices: list[torch.device]) -> Peers:
    """Return the peers when all ranks of a mesh live in this process, spread over `devices` in turn."""
    executor = InProcessExecutor(mesh, devices)
    placed = tuple(devices[rank % len(devices)] for rank in range(mesh.size))
    return Peers(executor, placed, leads=True, alone=True)
