"""Cutting another program of a module so that each stage finds the parameters that it has."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.program.program import InputRole
from paceline.program.stages.groups import Group, groups_of
from paceline.program.stages.pipeline import Pipeline
from paceline.program.stages.reading import Reading


def at_homes(reading: Reading, groups: Sequence[Group], like: Pipeline) -> tuple[int, ...] | None:
    """Return the groups with which stages begin, where each reads the parameters that the same stage of `like` reads.

    A stage begins with the first call that reads a parameter which no earlier stage has. So programs of other shapes,
    and those of evaluation, fit the ranks as they are, however their operators differ.

    Returns:
        None where parameters do not tell: a stage has none of its own, or they are read in another order.
    """
    stages_of: dict[str, set[int]] = {}
    for stage in like.stages:
        for name in stage.forward.inputs:
            item = like.inputs.get(name)
            if item is not None and item.role is InputRole.PARAMETER:
                stages_of.setdefault(item.name, set()).add(stage.index)
    number_of = groups_of(groups)
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for name, readers in reading.readers.items():
        homes = stages_of.get(name, set())
        if len(homes) == 1:
            (home,) = homes
            numbers = [number_of[node] for node in readers if node in number_of]
            begins[home] = min([begins.get(home, len(groups)), *numbers])
            ends[home] = max([ends.get(home, -1), *numbers])
    count = len(like.stages)
    if begins.keys() != set(range(count)) or any(ends[stage] >= begins[stage + 1] for stage in range(count - 1)):
        return None
    return tuple(begins[stage] for stage in range(1, count))
