"""Which layouts fit into memory, and what each must give up for that."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from paceline.planner.search.enumeration import in_all_ways, leanest_layouts
from paceline.planner.search.question import Question
from paceline.simulator.closed_form.estimates import Footprint
from paceline.simulator.closed_form.footprint import footprint
from paceline.simulator.layouts import Integers, Layouts
from paceline.simulator.workload import Recompute


@dataclass(frozen=True)
class Fitting:
    """What there is to choose from.

    Attributes:
        leanest: all ways to divide devices and samples, in the form that needs least memory.
        least_bytes: what those need.
        layouts: that fit, and that no other one is sure to beat.
        considered: how many layouts were looked at, those that share a leanest form that does not fit counted as one.
    """

    leanest: Layouts
    least_bytes: Integers
    layouts: Layouts
    considered: int


def fitting(asked: Question) -> Fitting:
    """Return the layouts that fit."""
    leanest = leanest_layouts(asked)
    needed = footprint(asked.workload, leanest).total
    hopeful = needed <= asked.memory_bytes
    ways = in_all_ways(leanest[hopeful], asked.layers)
    considered = len(Recompute) * len(ways) + int(np.count_nonzero(~hopeful))
    return Fitting(leanest, np.asarray(needed), _with_least_given_up(asked, ways), considered)


def in_ways_that_fit(asked: Question, leanest: Layouts) -> Layouts:
    """Return the layouts that fit of some leanest forms."""
    return _with_least_given_up(asked, in_all_ways(leanest, asked.layers))


def at(needs: Footprint, index: int) -> dict[str, float]:
    """Return the bytes of one layout, by kind."""
    return {
        field.name: float(np.broadcast_to(getattr(needs, field.name), needs.total.shape)[index])
        for field in fields(needs)
    }


def _with_least_given_up(asked: Question, ways: Layouts) -> Layouts:
    """Return the ways that fit, each with the least recomputation with which it does: more only takes time."""
    least = np.full(len(ways), len(Recompute), dtype=np.int64)
    waiting = np.arange(len(ways))
    for policy in Recompute:
        tried = replace(ways[waiting], recompute=np.full(len(waiting), policy.value))
        fits = footprint(asked.workload, tried).total <= asked.memory_bytes
        least[waiting[fits]] = policy.value
        waiting = waiting[~fits]
    return replace(ways, recompute=least)[least < len(Recompute)]
