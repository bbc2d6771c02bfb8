"""How long the calls of placed programs take on this machine: timed once, kept, and looked up ever after."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from paceline.placement.costs import Costs
from paceline.program.stages.seconds import flops_of
from paceline.program.views import is_view
from paceline.runtime.exemplars import Exemplars
from paceline.runtime.figures import key_of_device
from paceline.runtime.kept import Kept
from paceline.runtime.operator_calls import is_timed, key_of, nbytes_of
from paceline.runtime.shared import copied_members

_FILE = "operators-1.json"
_MOST_KEPT = 20_000
_ROUNDS = 7
_LEAST_ROUNDS = 2


class OperatorFile:
    """Seconds of calls in one file, by the machine that they were timed on and how many ranks computed at once.

    Args:
        directory: where the file is, beside cached programs; None: nothing is kept or found.
    """

    def __init__(self, directory: Path | None) -> None:
        self._kept = Kept(directory, _FILE)

    def load(self, device: torch.device, ranks: int) -> dict[str, float]:
        """Return what is known, by the keys of calls."""
        section = self._kept.section(_section(device, ranks))
        return {key: seconds for key, seconds in section.items() if isinstance(seconds, float) and seconds > 0}

    def store(self, device: torch.device, ranks: int, seconds: Mapping[str, float]) -> None:
        """Keep what was timed, beside what is there."""
        if seconds:
            newest = list({**self.load(device, ranks), **seconds}.items())[-_MOST_KEPT:]
            self._kept.store(_section(device, ranks), {key: float(f"{value:.4g}") for key, value in newest})


class MeasuredOperators:
    """Answers for calls that were timed, and for others by a roofline; it remembers that it had to.

    Args:
        timed: seconds by the keys of calls.
        otherwise: says what a call takes that was not timed.
        per_call: seconds that a call takes in generated code beside what its operator does.
        shares_memory: ranks find what they exchange where it lies, see `runtime.shared`.

    Attributes:
        missing: keys of calls that were not timed.
    """

    def __init__(
        self,
        timed: Mapping[str, float],
        otherwise: Callable[[Node], float],
        *,
        per_call: float = 0.0,
        shares_memory: bool = False,
    ) -> None:
        self._timed = timed
        self._otherwise = otherwise
        self._per_call = per_call
        self._shares_memory = shares_memory
        self._known: dict[Node, float] = {}
        self.missing: set[str] = set()

    def seconds(self, node: Node) -> float:
        """Return the seconds of a call."""
        if node not in self._known:
            self._known[node] = self._seconds(node)
        return self._known[node]

    def _seconds(self, node: Node) -> float:
        if node.op != "call_function":
            return 0.0
        if not is_timed(node):
            return self._per_call
        copied = copied_members(node) if self._shares_memory else None
        if copied is not None:
            return sum(self._copy(member) for member in copied)
        key = key_of(node)
        found = self._timed.get(key)
        if found is not None:
            return found + self._per_call
        if is_view(node):
            return self._per_call
        self.missing.add(key)
        return self._otherwise(node)

    def _copy(self, member: Node) -> float:
        """A member of a bucket that no product makes is copied to its place: as long as another copy of it takes."""
        return self._otherwise(member)


def roofline(costs: Costs) -> Callable[[Node], float]:
    """Return what says roughly how long a call takes, from the figures of a machine."""

    def seconds(node: Node) -> float:
        flops = flops_of(node)
        touched = float(sum(nbytes_of(each.meta.get("val")) for each in (node, *node.all_input_nodes)))
        machine = costs.machine
        return machine.per_call + machine.touching.seconds(touched) + machine.products.seconds(flops)

    return seconds


def timed_operators(
    graphs: Iterable[Graph], device: torch.device, directory: Path | None, *, budget_s: float, ranks: int = 1
) -> dict[str, float]:
    """Return what the calls of graphs take, by key: as was timed before, and where it was not, timed now.

    Where there are several ranks, all of them time at once, as they compute at once: a collective.

    Args:
        graphs: the same on every rank.
        device: where they run.
        directory: where times are kept.
        budget_s: how long timing may take, about.
        ranks: how many compute at once.
    """
    leads = ranks == 1 or dist.get_rank() == 0
    file = OperatorFile(directory)
    known = file.load(device, ranks) if leads else {}
    if ranks > 1:
        known = _from_leader(known, device)
    exemplars = Exemplars(graphs, device, known=known)
    if not len(exemplars):
        return known
    began = time.perf_counter()
    exemplars.round(counts=False, within_s=budget_s / 2)
    for _ in range(_rounds(time.perf_counter() - began, budget_s, ranks, device)):
        if ranks > 1:
            dist.barrier()
        exemplars.round()
    found = exemplars.seconds
    if leads:
        file.store(device, ranks, found)
    return {**known, **(_from_leader(found, device) if ranks > 1 else found)}


def _rounds(first_s: float, budget_s: float, ranks: int, device: torch.device) -> int:
    """Return how many rounds fit, the same number on every rank."""
    fitting = int((budget_s - first_s) / max(first_s, 1e-3))
    rounds = torch.tensor([max(_LEAST_ROUNDS, min(_ROUNDS, fitting))], device=device)
    if ranks > 1:
        dist.broadcast(rounds, src=0)
    return int(rounds)


def _from_leader(known: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return what rank 0 knows."""
    content = torch.frombuffer(bytearray(json.dumps(known).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([content.numel()], device=device)
    dist.broadcast(size, src=0)
    received = content if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(received, src=0)
    return dict(json.loads(received.cpu().numpy().tobytes()))


def _section(device: torch.device, ranks: int) -> str:
    return f"{key_of_device(device)}, {ranks} at once"
