"""What the ranks of a calibration do: all of them compute the same probes at once, and then exchange.

The job is started by `runtime.job.launch`; rank 0 leaves what it found in a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from paceline.plan import Mesh
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import World
from paceline.runtime.link_times import KINDS, SIZES, measured_collectives
from paceline.runtime.peers import connect
from paceline.runtime.timing import processor
from paceline.simulator.calibration.probes import Family, Probe, Probing

_AXIS = "dp"
Points = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Job:
    """What ranks are asked.

    Attributes:
        file: where rank 0 leaves what it found.
        rounds: how often each probe is run.
        device: `cpu`, `cuda` or `auto`.
        backend: between ranks on CPUs.
        sizes: bytes of collectives.
    """

    file: str
    rounds: int = 7
    device: str = "auto"
    backend: str = "auto"
    sizes: tuple[int, ...] = SIZES

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Job:
        """Read what `to_json` wrote."""
        return cls(**{**values, "sizes": tuple(values["sizes"])})


@dataclass(frozen=True)
class Findings:
    """What a job found.

    Attributes:
        seconds: of probes, with all ranks at work.
        points: of collectives, by kind; none where there is one rank.
        ranks: how many there were.
        device: the device's name.
        memory_bytes: what programs on one rank may use.
        transport: what carried tensors between ranks: `shm`, `gloo` or `nccl`.
        words: the same for people.
    """

    seconds: Mapping[Probe, float]
    points: Points
    ranks: int
    device: str
    memory_bytes: float
    transport: str
    words: str

    def write(self, file: Path) -> None:
        """Write what `read` reads."""
        values = {**vars(self), "seconds": [[asdict(probe), taken] for probe, taken in self.seconds.items()]}
        file.write_text(json.dumps(values), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Findings:
        """Read what `write` wrote."""
        values = json.loads(file.read_text(encoding="utf-8"))
        seconds = {
            Probe(**{**probe, "family": Family(probe["family"]), "dims": tuple(probe["dims"])}): taken
            for probe, taken in values["seconds"]
        }
        points = {kind: [(size, taken) for size, taken in found] for kind, found in values["points"].items()}
        return cls(**{**values, "seconds": seconds, "points": points})


def measure(arguments: dict[str, Any]) -> None:
    """Be one of the ranks."""
    job = Job.from_json(arguments)
    with join(job.device, job.backend) as world:
        if world.device.type == "cpu":
            torch.set_num_threads(1)
        with Progress(console=Console(stderr=True), disable=world.rank > 0) as progress:
            task = progress.add_task("operators", total=job.rounds + 1 + len(KINDS))

            def tell(what: str) -> None:
                progress.update(task, description=what, advance=1)

            probing = Probing(world.device)
            for number in range(job.rounds + 1):
                if world.size > 1:
                    dist.barrier()
                probing.round(counts=number > 0)
                tell("operators")
            points: Points = {}
            if world.size > 1:
                mesh = Mesh(((_AXIS, world.size),))
                peers = connect(mesh, world.device, compile=False)
                found = measured_collectives(peers, mesh, sizes=job.sizes, tell=tell)
                points = {kind: [*of_kind] for kind, of_kind in found.points[_AXIS].items()}
        if world.rank == 0:
            _findings(world, probing, points).write(Path(job.file))


def _findings(world: World, probing: Probing, points: Points) -> Findings:
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        name, memory = torch.cuda.get_device_name(world.device), float(torch.cuda.mem_get_info(world.device)[1])
    else:
        name, memory = f"a core of {processor()}", _host_bytes() / world.size
    transport = "nccl" if on_gpu else world.backend.name
    words = "NCCL" if on_gpu else world.backend.words
    return Findings(probing.seconds, points, world.size, name, memory, transport, words)


def _host_bytes() -> float:
    """Return the memory of this host."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
