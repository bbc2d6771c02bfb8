"""The figures of this machine, of which the costs of placements are made: measured once, kept beside cached programs.

Rank 0 knows what is known; the rest all ranks measure together. Without a cache directory nothing is measured, and
costs are round figures. A figure that is there is not measured again: a plan should not change from run to run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.placement.costs import Costs
from paceline.placement.machine import Links, Machine, links_from_json, links_to_json
from paceline.plan import Plan
from paceline.runtime.kept import Kept
from paceline.runtime.peers import Peers
from paceline.runtime.timing import measured_links, measured_machine, processor

_FILE = "machine-1.json"
_MACHINES, _LINKS = "machines", "links"
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError)
T = TypeVar("T")


class Figures:
    """Figures in one file, by what they were measured on.

    Args:
        directory: where the file is; None: nothing is kept or found.
    """

    def __init__(self, directory: Path | None) -> None:
        self._kept = Kept(directory, _FILE)

    def machine(self, device: torch.device) -> Machine | None:
        """Return the rates of operators on a device like this one, without links."""
        return _parsed(Machine.from_json, self._kept.section(_MACHINES).get(key_of_device(device)))

    def links(self, device: torch.device, way: str) -> dict[int, Links]:
        """Return what collectives take by the number of ranks, where these are connected in some way."""
        return _parsed(_links, self._kept.section(_LINKS).get(f"{key_of_device(device)}, {way}")) or {}

    def latest(self, device: torch.device) -> Machine | None:
        """Return what was measured last on a device like this one, by however many threads and ranks of any job."""
        machines = [data for key, data in self._kept.section(_MACHINES).items() if key.startswith(_name(device))]
        ways = [data for key, data in self._kept.section(_LINKS).items() if key.startswith(_name(device))]
        machine = _parsed(Machine.from_json, machines[-1]) if machines else None
        links: dict[int, Links] = {}
        for way in ways:
            links |= _parsed(_links, way) or {}
        return None if machine is None else replace(machine, links=links)

    def store(self, device: torch.device, machine: Machine, way: str, links: Mapping[int, Links]) -> None:
        """Keep figures; where that is impossible the log says so."""
        kept = {str(parts): links_to_json(found) for parts, found in links.items()}
        self._kept.store(_MACHINES, self._kept.section(_MACHINES) | {key_of_device(device): machine.to_json()})
        self._kept.store(_LINKS, self._kept.section(_LINKS) | {f"{key_of_device(device)}, {way}": kept})


def known_costs(device: torch.device, directory: Path | None) -> Costs:
    """Return what is known of costs on a device: measured by jobs before, or round figures. Measures nothing."""
    machine = Figures(directory).latest(device)
    return Costs.default() if machine is None else Costs.of_machine(machine)


def costs_of(peers: Peers, plan: Plan, directory: Path | None) -> Costs:
    """Return what operators and collectives cost here, to rank 0, which plans for all. A collective."""
    if peers.alone:
        return Costs.default()
    device, way = peers.devices[0], way_between_ranks()
    figures = Figures(directory)
    machine, links = figures.machine(device), figures.links(device, way)
    axis_of = {parts: axis for axis, parts in plan.mesh.axes if parts > 1}
    wanted = [peers.leads and directory is not None and parts not in links for parts in axis_of]
    flags = torch.tensor(wanted, dtype=torch.uint8, device=device)
    peers.broadcast(flags)
    if peers.leads and directory is not None and machine is None:
        machine = measured_machine(device)
    # What compilers make of collectives is no different, but compiling the ones to measure would take longer.
    missing = [] if plan.compile else [parts for parts, flag in zip(axis_of, flags.tolist(), strict=True) if flag]
    for parts in missing:
        links[parts] = measured_links(peers.executor, axis_of[parts], parts, device)
    if machine is None:
        return Costs.default()
    if peers.leads and (missing or figures.machine(device) is None):
        figures.store(device, machine, way, links)
    return Costs.of_machine(replace(machine, links=links))


def _name(device: torch.device) -> str:
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return f"{what}, torch {torch.__version__}"


def key_of_device(device: torch.device) -> str:
    """Return what figures of a device depend on: its name, torch, and on a CPU the number of threads."""
    return _name(device) if device.type == "cuda" else f"{_name(device)}, {torch.get_num_threads()} threads"


def way_between_ranks() -> str:
    """Return how the ranks of this job are connected, in words."""
    size = dist.get_world_size()
    return f"{dist.get_backend()}, {size} ranks, {os.environ.get('LOCAL_WORLD_SIZE', size)} on a host"


def _links(data: Any) -> dict[int, Links]:
    return {int(parts): links_from_json(links) for parts, links in data.items()}


def _parsed(parse: Callable[[Any], T], data: Any) -> T | None:
    try:
        return None if data is None else parse(data)
    except _MALFORMED:
        return None
