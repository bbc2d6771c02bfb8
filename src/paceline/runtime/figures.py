"""The figures of this machine, of which the costs of placements are made: measured once, kept beside cached programs.

Rank 0 knows what is known; the rest all ranks measure together. Without a cache directory nothing is measured, and
costs are round figures. A figure that is there is not measured again: a plan should not change from run to run.
"""

from __future__ import annotations

import json
import logging
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
from paceline.runtime.peers import Peers
from paceline.runtime.program_cache import read_ours, write_atomically
from paceline.runtime.timing import measured_links, measured_machine, processor

_log = logging.getLogger(__name__)
_FILE = "machine-1.json"
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError)
T = TypeVar("T")


class Figures:
    """Figures in one file, by what they were measured on.

    Args:
        directory: where the file is; None: nothing is kept or found.
    """

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / _FILE

    def machine(self, device: torch.device) -> Machine | None:
        """Return the rates of operators on a device like this one, without links."""
        return _parsed(Machine.from_json, self._section("machines").get(key_of_device(device)))

    def links(self, device: torch.device, way: str) -> dict[int, Links]:
        """Return what collectives take by the number of ranks, where these are connected in some way."""
        return _parsed(_links, self._section("links").get(f"{key_of_device(device)}, {way}")) or {}

    def latest(self, device: torch.device) -> Machine | None:
        """Return what was measured last on a device like this one, by however many threads and ranks of any job."""
        machines = [data for key, data in self._section("machines").items() if key.startswith(_name(device))]
        ways = [data for key, data in self._section("links").items() if key.startswith(_name(device))]
        machine = _parsed(Machine.from_json, machines[-1]) if machines else None
        links: dict[int, Links] = {}
        for way in ways:
            links |= _parsed(_links, way) or {}
        return None if machine is None else replace(machine, links=links)

    def store(self, device: torch.device, machine: Machine, way: str, links: Mapping[int, Links]) -> None:
        """Keep figures; where that is impossible the log says so."""
        if self._path is None:
            return
        kept = {str(parts): links_to_json(found) for parts, found in links.items()}
        machines = self._section("machines") | {key_of_device(device): machine.to_json()}
        ways = self._section("links") | {f"{key_of_device(device)}, {way}": kept}
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps({"machines": machines, "links": ways}, indent=1).encode())
        except OSError as error:
            _log.warning("the figures of this machine are not kept: %s", error)

    def _section(self, name: str) -> dict[str, Any]:
        try:
            content = None if self._path is None else read_ours(self._path)
            return {} if content is None else dict(json.loads(content)[name])
        except _MALFORMED:  # there is none, or it is damaged: what is measured next replaces it
            return {}


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
