"""Nothing fits: what is missing, and the nearest questions with which something does fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from paceline.planner.search.enumeration import leanest_layouts
from paceline.planner.search.fitting import at
from paceline.planner.search.question import AXES, Question
from paceline.simulator.closed_form.footprint import footprint
from paceline.simulator.layouts import Layouts

_TIMES = [2**power for power in range(1, 11)]
"""How many times more devices, or samples, are tried."""
_FEWER = 64
"""How many fewer devices are tried, where none of the layouts divides."""


@dataclass(frozen=True)
class Near:
    """A question with which something fits.

    Attributes:
        asked: it.
        layout: that needs least.
        memory: bytes of that, by kind.
    """

    asked: Question
    layout: Layouts
    memory: Mapping[str, float]


@dataclass(frozen=True)
class Shortfall:
    """What is missing.

    Attributes:
        layout: that needs least; None where no layout divides devices and batch at all.
        memory: its bytes on the rank that needs most, by kind.
        limit_bytes: what a rank may hold.
        near: questions with which something fits, each with one thing changed.
    """

    layout: Layouts | None
    memory: Mapping[str, float]
    limit_bytes: float
    near: tuple[Near, ...]

    @property
    def missing_bytes(self) -> float:
        """By how much the layout that needs least does not fit."""
        return sum(self.memory.values()) - self.limit_bytes


def shortfall(asked: Question) -> Shortfall:
    """Return what is missing where nothing fits."""
    layout, memory = _least(asked)
    return Shortfall(layout, memory, asked.memory_bytes, tuple(_near(asked)))


def _least(asked: Question) -> tuple[Layouts | None, dict[str, float]]:
    """Return the layout that needs least memory, and its bytes."""
    layouts = leanest_layouts(asked)
    if not len(layouts):
        return None, {}
    needs = footprint(asked.workload, layouts)
    index = int(np.argmin(needs.total))
    return layouts[index : index + 1], at(needs, index)


def _near(asked: Question) -> Iterator[Near]:
    """Yield, where something fits with it: all axes, fewer devices, more devices, a larger batch."""
    count = asked.devices
    changes: list[Iterable[Question]] = [
        [replace(asked, axes=frozenset(AXES))],
        (replace(asked, devices=fewer) for fewer in range(count - 1, max(count - _FEWER, 0), -1)),
        (replace(asked, devices=times * count) for times in _TIMES),
        (replace(asked, batch=times * asked.batch) for times in _TIMES),
    ]
    for questions in changes:
        for changed in questions:
            layout, memory = _least(changed)
            if layout is not None and sum(memory.values()) <= changed.memory_bytes:
                yield Near(changed, layout, memory)
                break
