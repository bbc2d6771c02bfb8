"""The search itself: all layouts that fit, estimated at once, the best of them looked at closely, and ranked."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.planner.search.candidates.baselines import Baseline, baselines
from paceline.planner.search.candidates.candidate import Candidate, candidates
from paceline.planner.search.certainty import certainty, is_clear
from paceline.planner.search.closely import simulated
from paceline.planner.search.fitting import fitting
from paceline.planner.search.question import Question, question
from paceline.planner.search.shortfall import Shortfall, shortfall
from paceline.simulator.closed_form.estimate import estimate
from paceline.simulator.closed_form.estimates import Estimates
from paceline.simulator.closed_form.footprint import footprint
from paceline.simulator.layouts import Integers, Layouts
from paceline.simulator.workload import Workload

_CLOSELY = 50
_OF_ONE_MESH = 3
"""Layouts that are looked at closely, and how many of them may have the same mesh."""
Closely = Callable[[Question], Callable[[Candidate], Candidate]]


@dataclass(frozen=True)
class Ranking:
    """What a search found.

    Attributes:
        asked: what was searched.
        plans: the best layout of each mesh, best first; empty where nothing fits.
        baselines: that are always shown, whether they fit or not.
        shortfall: what is missing, where nothing fits.
        considered: how many layouts there are.
        fitting: how many of them fit, each with the least recomputation with which it does.
        estimating_s: seconds that it took to estimate all layouts.
        simulating_s: seconds that it took to look at the best closely.
    """

    asked: Question
    plans: tuple[Candidate, ...]
    baselines: tuple[Baseline, ...]
    shortfall: Shortfall | None
    considered: int
    fitting: int
    estimating_s: float
    simulating_s: float

    @property
    def as_good(self) -> int:
        """How many plans, the best included, are so close that the estimate's error may have decided between them."""
        return sum(not is_clear(certainty(self.plans[0], plan)) for plan in self.plans)


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    batch: int,
    devices: int | None = None,
    memory_bytes: float | None = None,
    axes: Collection[str] | None = None,
    closely: Closely = simulated,
    tell: Callable[[str], None] = lambda _: None,
) -> Ranking:
    """Return the best plans for a workload on a cluster.

    Args:
        workload: of one model.
        cluster: where it is to run.
        batch: samples of a step.
        devices: how many to use; by default all.
        memory_bytes: what a rank may hold; by default what the smallest device has.
        axes: that a plan may use, by name; by default all.
        closely: returns what looks at a candidate closely; the best are ranked by what that says.
        tell: is told what is being done, in a few words.

    Raises:
        PlanError: the arguments do not fit each other.
    """
    began = time.perf_counter()
    asked = question(workload, cluster, batch=batch, devices=devices, memory_bytes=memory_bytes, axes=axes)
    tell("enumerating layouts")
    found = fitting(asked)
    tell(f"estimating {len(found.layouts):,} layouts that fit, of {found.considered:,}")
    ranked = _candidates(asked, found.layouts[_best(found.layouts, estimate(workload, found.layouts, cluster))])
    estimated = time.perf_counter()
    look = closely(asked)
    for number, one in enumerate(ranked):
        tell(f"simulating the best: {number + 1} of {len(ranked)}")
        ranked[number] = look(one)
    plans = _one_of_each_mesh(sorted((one for one in ranked if one.fits), key=_risk))

    def best(layouts: Layouts) -> Candidate:
        return look(min(_candidates(asked, layouts), key=_risk))

    beside = baselines(asked, found, best)
    lack = None if plans else shortfall(asked)
    took = estimated - began, time.perf_counter() - estimated
    return Ranking(asked, plans, beside, lack, found.considered, len(found.layouts), *took)


def _risk(one: Candidate) -> float:
    return one.risk_s


def _candidates(asked: Question, layouts: Layouts) -> list[Candidate]:
    if not len(layouts):
        return []
    needs = footprint(asked.workload, layouts)
    return candidates(asked, layouts, needs, estimate(asked.workload, layouts, asked.cluster))


def _best(layouts: Layouts, times: Estimates) -> Integers:
    """Return which layouts to look at closely: the best, of each mesh a few, however it divides `dp` and `fsdp`."""
    order = np.argsort(times.risk_s, kind="stable")
    keys = _mesh_keys(layouts)[order]
    groups = np.argsort(keys, kind="stable")
    first = np.r_[True, keys[groups][1:] != keys[groups][:-1]] if len(keys) else np.zeros(0, dtype=bool)
    starts = np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))
    place = np.empty(len(keys), dtype=np.int64)
    place[groups] = np.arange(len(keys)) - starts
    return order[place < _OF_ONE_MESH][:_CLOSELY]


def _mesh_keys(layouts: Layouts) -> Integers:
    """Return a number for each mesh."""
    key = np.zeros(len(layouts), dtype=np.int64)
    for sizes in (layouts.replicas, layouts.sp, layouts.hw, layouts.tp):  # the rest is `pp`
        _, codes = np.unique(sizes, return_inverse=True)
        key = key * (int(codes.max(initial=0)) + 1) + codes
    return key


def _one_of_each_mesh(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    first: dict[str, Candidate] = {}
    for one in ranked:
        first.setdefault(str(one.mesh), one)
    return tuple(first.values())
