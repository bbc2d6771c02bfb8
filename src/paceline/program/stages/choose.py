"""Where to cut: dynamic programming over the places where a program may be cut.

The slowest stage is to be as quick as can be; among equals, all are to be alike. A stage takes the time of its calls,
forward and backward, and of the messages at its two ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import Node

from paceline.errors import PlanError
from paceline.program.stages.groups import Group, groups_of
from paceline.program.stages.kinds import bytes_of, tensors
from paceline.program.stages.reading import Reading
from paceline.program.stages.seconds import message_seconds

_PLACES = 256
"""So many places to cut are weighed, more only for many stages: the one of least traffic in each stretch of time."""
_STATES = 4
"""A parameter, its gradient, and two moments of its optimizer."""


@dataclass(frozen=True)
class Weights:
    """What the groups of a program cost.

    Attributes:
        seconds: of each group, forward and backward.
        crossing: seconds of the messages, forward and backward, where a stage begins with the group.
        held: bytes that a stage holds for each group: parameters with their optimizer, and values saved for the
            backward pass of one micro-batch.
    """

    seconds: tuple[float, ...]
    crossing: tuple[float, ...]
    held: tuple[int, ...]


def weigh(reading: Reading, groups: Sequence[Group], seconds_of: Callable[[Node], float]) -> Weights:
    """Return what groups cost."""
    number_of = groups_of(groups)
    home = {**number_of, **_homes(reading, number_of)}
    seconds = [0.0] * len(groups)
    for node, number in home.items():
        seconds[number] += seconds_of(node)
    crossing = crossing_of(reading, groups, _price)
    return Weights(tuple(seconds), crossing, _held(reading, number_of, len(groups)))


def _homes(reading: Reading, number_of: dict[Node, int]) -> dict[Node, int]:
    """Return the group near which each gradient is probably made."""
    by_sequence = {node.meta.get("sequence"): number for node, number in number_of.items()}
    by_sequence.pop(None, None)
    homes: dict[Node, int] = {}
    for node in reading.gradients:
        near = by_sequence.get(node.meta.get("sequence"))
        if near is None:
            forward = [number_of[source] for source in node.all_input_nodes if source in number_of]
            later = [homes[source] for source in node.all_input_nodes if source in homes]
            near = max(forward, default=min(later, default=len(reading.body) and max(number_of.values())))
        homes[node] = near
    return homes


def crossing_of(reading: Reading, groups: Sequence[Group], price: Callable[[Node], float]) -> tuple[float, ...]:
    """Return for each group what it costs to hand on the values that are made before it and read from it on."""
    number_of = groups_of(groups)
    last: dict[Node, int] = {}
    for node in reading.body:
        for source in node.all_input_nodes:
            if source in number_of:
                root = reading.root(source)
                last[root] = max(last.get(root, 0), number_of[node])
    steps = [0.0] * (len(groups) + 1)
    for root, until in last.items():
        if until > number_of[root]:
            steps[number_of[root] + 1] += price(root)
            steps[until + 1] -= price(root)
    return tuple(max(total, 0.0) for total in list(accumulate(steps))[: len(groups)])


def _price(root: Node) -> float:
    """Seconds of the messages of a value, and of its gradient if it may have one."""
    values = list(tensors(root.meta.get("val")))
    there_and_back = 2 if any(value.is_floating_point() for value in values) else 1
    return there_and_back * message_seconds(bytes_of(root))


def _held(reading: Reading, number_of: dict[Node, int], count: int) -> tuple[int, ...]:
    held = [0] * count
    nodes = {item.name: node for node, item in reading.input_of.items()}
    for name, readers in reading.readers.items():
        numbers = [number_of[reader] for reader in readers]
        for number in {min(numbers), max(numbers)}:
            held[number] += _STATES * bytes_of(nodes[name])
    for node, number in number_of.items():
        if not node.meta.get("rematerialize") and any(reading.is_gradient(user) for user in node.users):
            held[number] += bytes_of(node)
    return tuple(held)


def choose(weights: Weights, count: int, memory_bytes: float | None = None) -> tuple[int, ...]:
    """Return the groups with which stages 1, 2, ... begin.

    Raises:
        PlanError: there are fewer groups than stages, or no cut fits into the memory.
    """
    total = len(weights.seconds)
    if count > max(total, 1):
        raise PlanError(
            f"the module cannot be cut into {count} stages: its operators form {total} groups that may be separated. "
            f"Use at most {total} stages: a smaller pp, or fewer chunks for each rank."
        )
    places = [0, *_places(weights, count), total]
    time = [0.0, *accumulate(weights.seconds)]
    held = [0, *accumulate(weights.held)]
    crossing = (*weights.crossing, 0.0)
    limit = math.inf if memory_bytes is None else memory_bytes
    best: list[tuple[float, float, tuple[int, ...]] | None] = [None] * len(places)
    best[0] = 0.0, 0.0, ()
    for _ in range(count):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * len(places)
        for j in range(1, len(places)):
            for i in reversed(range(j)):
                before, known = best[i], following[j]
                alone = time[places[j]] - time[places[i]]
                if held[places[j]] - held[places[i]] > limit or (known is not None and alone > known[0]):
                    break  # with more calls it gets worse
                if before is None:
                    continue
                stage = alone + crossing[places[i]] + crossing[places[j]]
                slowest, squares = max(before[0], stage), before[1] + stage * stage
                if known is None or (slowest, squares) < known[:2]:
                    following[j] = slowest, squares, (*before[2], places[i])
        best = following
    if best[-1] is None:
        raise PlanError(
            f"no cut into {count} stages holds at most {limit / 1e9:.3g} GB each: the module's parameters with their "
            f"optimizer and saved values take {held[-1] / 1e9:.3g} GB. Use more stages or more memory."
        )
    return best[-1][2][1:]


def _places(weights: Weights, count: int) -> list[int]:
    """Return the groups that a stage may begin with: in each stretch of time, the one of least traffic."""
    total = len(weights.seconds)
    if total <= max(_PLACES, 4 * count):
        return list(range(1, total))
    stretch = sum(weights.seconds) / max(_PLACES, 4 * count) or 1.0
    cheapest: dict[int, int] = {}
    passed = 0.0
    for number in range(1, total):
        passed += weights.seconds[number - 1]
        known = cheapest.setdefault(int(passed / stretch), number)
        if weights.crossing[number] < weights.crossing[known]:
            cheapest[int(passed / stretch)] = number
    return sorted(cheapest.values())
