"""Cutting another program of a module so that each stage finds the parameters and buffers that it has."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.fx import Node

from paceline.program.program import InputRole
from paceline.program.stages.groups import Group
from paceline.program.stages.kinds import is_call
from paceline.program.stages.pipeline import Pipeline
from paceline.program.stages.reading import Reading

_STATE = (InputRole.PARAMETER, InputRole.BUFFER)


def at_homes(reading: Reading, groups: Sequence[Group], like: Pipeline) -> tuple[int, ...] | None:
    """Return the groups with which stages begin, where each reads only what the same stage of `like` has.

    So programs of other shapes, and those of evaluation, fit the ranks as they are, however their operators differ. Of
    all such cuts, this is the one nearest to where `like` was cut: stages may have no parameters of their own.

    Returns:
        None where there is no such cut.
    """
    count = len(like.stages)
    homes = _homes(like)
    ends = _fractions(like)
    total = sum(len(group.nodes) for group in groups)
    places = list(range(count))
    # The cheapest ways to have put all groups so far, the last one into each stage; each knows where stages began.
    ways: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *((math.inf, ()) for _ in range(count - 1))]
    passed = 0
    for number, group in enumerate(groups):
        wanted = [homes[name] for name in _state(reading, group.nodes) if name in homes]
        found = []
        for stage in places:
            stay = ways[stage]
            if number and stage:
                cost, starts = ways[stage - 1]
                stay = min(stay, (cost + abs(passed / total - ends[stage - 1]), (*starts, number)))
            found.append(stay if all(stage in stages for stages in wanted) else (math.inf, ()))
        ways = found
        passed += len(group.nodes)
    cost, starts = ways[-1]
    return None if math.isinf(cost) else starts


def _homes(like: Pipeline) -> dict[str, set[int]]:
    """For each parameter and buffer, the stages that have it."""
    found: dict[str, set[int]] = {}
    for stage in like.stages:
        parts = (stage.forward, stage.backward, stage.backward_input, stage.backward_weight)
        names = [name for part in parts if part is not None for name in part.inputs if name in like.inputs]
        read = [like.inputs[name] for name in names]
        for name in (*stage.gradients, *(item.name for item in read if item.role in _STATE)):
            found.setdefault(name, set()).add(stage.index)
    return found


def _fractions(like: Pipeline) -> list[float]:
    """The share of all forward calls that are made when each stage ends."""
    calls = [sum(map(is_call, stage.forward.graph.nodes)) for stage in like.stages]
    return [sum(calls[: number + 1]) / max(1, sum(calls)) for number in range(len(calls))]


def _state(reading: Reading, nodes: Sequence[Node]) -> set[str]:
    """The parameters and buffers that calls read, as they are or through what every stage makes for itself."""
    waiting, seen, found = list(nodes), set[Node](), set[str]()
    while waiting:
        for source in waiting.pop().all_input_nodes:
            item = reading.input_of.get(source)
            if item is not None and item.role in _STATE:
                found.add(item.name)
            elif source in reading.free and source not in seen:
                seen.add(source)
                waiting.append(source)
    return found
