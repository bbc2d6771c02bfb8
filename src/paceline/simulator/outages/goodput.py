"""How much of some weeks advances a job that fails, for many intervals between checkpoints and many runs at once.

A run is simulated from one interruption to the next. All intervals see the same interruptions, so what differs between
them is due to the interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PlanError
from paceline.simulator.outages.failures import Checkpoints, HostPool, Interruptions, Recovery
from paceline.simulator.workload import Numbers

_LIKELY = (0.05, 0.95)


class Spent(StrEnum):
    """What the time of a job goes into."""

    USEFUL = "useful"
    CHECKPOINTS = "checkpoints"
    LOST = "lost"
    """Work since the last checkpoint that counts, which is done again."""
    DETECTION = "detection"
    WAITING = "waiting"
    """For a host to take the place of one that broke."""
    RESTART = "restart"


@dataclass(frozen=True)
class Goodput:
    """What the runs say of each interval.

    Attributes:
        interval_s: work between two checkpoints.
        goodput: share of the time that advances the job, the mean over runs.
        low, high: between which nine of ten runs lie.
        error: standard error of the mean.
        shares: of the time, by what it goes into; they add up to 1.
        interruptions: of a run, the mean; of them, those that were announced.
        announced: see there.
    """

    interval_s: Numbers
    goodput: Numbers
    low: Numbers
    high: Numbers
    error: Numbers
    shares: Mapping[Spent, Numbers]
    interruptions: Numbers
    announced: Numbers

    @property
    def best(self) -> int:
        """Index of the interval with the highest goodput."""
        return int(self.goodput.argmax())


def simulate_goodput(
    interruptions: Interruptions,
    recovery: Recovery,
    checkpoints: Checkpoints,
    interval_s: Numbers,
    *,
    horizon_s: float,
    runs: int = 200,
    seed: int = 0,
) -> Goodput:
    """Simulate some runs of `horizon_s` seconds for each interval.

    A checkpoint counts `write_s` after it was taken. Interruptions may come while the job is restarting, too: then it
    starts again; while it waits for a host nothing breaks. What is under way at the end of a run counts as done.

    Raises:
        PlanError: an interval is shorter than a checkpoint takes to be written, or a number is not positive.
    """
    intervals = np.atleast_1d(np.asarray(interval_s, dtype=np.float64))
    if intervals.min() <= 0 or horizon_s <= 0 or runs < 1:
        raise PlanError("intervals, the time simulated and the number of runs are positive.")
    if intervals.min() < checkpoints.write_s:
        raise PlanError(
            f"checkpoints every {intervals.min():g} s would overlap: one takes {checkpoints.write_s:g} s to be "
            "written. Save less often, or write faster."
        )
    walk = _Runs(interruptions, recovery, checkpoints, intervals[:, None], horizon_s, runs)
    random = np.random.default_rng(seed)
    while not walk.over:
        walk.until_next_interruption(random)
    return walk.result()


class _Runs:
    """Runs side by side: arrays are intervals by runs."""

    def __init__(
        self,
        interruptions: Interruptions,
        recovery: Recovery,
        checkpoints: Checkpoints,
        intervals: Numbers,
        horizon_s: float,
        runs: int,
    ) -> None:
        self._interruptions, self._recovery, self._checkpoints = interruptions, recovery, checkpoints
        self._intervals, self._horizon = intervals, horizon_s
        shape = len(intervals), runs
        self._now = np.zeros(shape)
        self._owed = {spent: np.zeros(shape) for spent in (Spent.DETECTION, Spent.RESTART)}
        self._spent = {spent: np.zeros(shape) for spent in Spent}
        self._count, self._announced = np.zeros(shape), np.zeros(shape)
        self._hosts = HostPool(shape, recovery.spares)

    @property
    def over(self) -> bool:
        """Whether all runs are through."""
        return bool((self._now >= self._horizon).all())

    def until_next_interruption(self, random: np.random.Generator) -> None:
        """Recover, compute, be interrupted, and wait for a host where one is needed."""
        runs = self._now.shape[1]
        left = np.maximum(self._horizon - self._now, 0.0)
        drawn = self._interruptions.draw(random, runs)
        announced = random.random(runs) < self._interruptions.announced
        breaks = ~announced & (random.random(runs) < self._interruptions.broken)
        repair = self._recovery.repair_s * random.standard_exponential(runs)

        interrupted = drawn < left
        uptime = np.minimum(drawn, left)
        computing = self._recover(uptime)
        self._compute(computing, interrupted, announced)
        self._now += uptime
        self._count += interrupted
        self._announced += interrupted & announced
        self._stop(interrupted, announced, interrupted & breaks, repair)

    def _recover(self, uptime: Numbers) -> Numbers:
        """Spend what is owed to the last interruption; return what is left to compute in."""
        for spent, owed in self._owed.items():
            part = np.minimum(uptime, owed)
            self._spent[spent] += part
            uptime = uptime - part
        return uptime

    def _compute(self, seconds: Numbers, interrupted: NDArray[np.bool_], announced: NDArray[np.bool_]) -> None:
        stall = self._checkpoints.stall_s
        cycles, rest = np.divmod(seconds, self._intervals + stall)
        work = cycles * self._intervals + np.minimum(rest, self._intervals)
        written = np.floor(np.maximum(seconds - self._checkpoints.write_s, 0.0) / (self._intervals + stall))
        lost = np.where(interrupted & ~announced, work - written * self._intervals, 0.0)
        self._spent[Spent.USEFUL] += work - lost
        self._spent[Spent.LOST] += lost
        self._spent[Spent.CHECKPOINTS] += seconds - work

    def _stop(
        self,
        interrupted: NDArray[np.bool_],
        announced: NDArray[np.bool_],
        breaks: NDArray[np.bool_],
        repair: Numbers,
    ) -> None:
        """Save where it was announced, wait for a host where one broke, and owe detection and restart."""
        left = np.maximum(self._horizon - self._now, 0.0)
        saving = np.where(interrupted & announced, np.minimum(self._checkpoints.stall_s, left), 0.0)
        wanted = self._now + self._recovery.detect_s
        waiting = self._hosts.replace(wanted, self._now + repair, breaks)
        waiting = np.minimum(waiting, left - saving)
        self._spent[Spent.CHECKPOINTS] += saving
        self._spent[Spent.WAITING] += waiting
        self._now += saving + waiting
        self._owed[Spent.DETECTION] = np.where(announced, 0.0, self._recovery.detect_s) + np.zeros_like(self._now)
        self._owed[Spent.RESTART] = np.full_like(self._now, self._recovery.restart_s)

    def result(self) -> Goodput:
        shares = {spent: seconds / self._horizon for spent, seconds in self._spent.items()}
        useful = shares[Spent.USEFUL]
        low, high = np.quantile(useful, _LIKELY, axis=1)
        runs = useful.shape[1]
        return Goodput(
            interval_s=self._intervals[:, 0],
            goodput=useful.mean(axis=1),
            low=low,
            high=high,
            error=useful.std(axis=1, ddof=1) / np.sqrt(runs) if runs > 1 else np.full(len(useful), np.nan),
            shares={spent: share.mean(axis=1) for spent, share in shares.items()},
            interruptions=self._count.mean(axis=1),
            announced=self._announced.mean(axis=1),
        )
