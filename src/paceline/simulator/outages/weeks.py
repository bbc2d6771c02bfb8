"""Goodput over weeks as a question that people ask: which interval, how many spare hosts, and do the formulas agree?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.errors import PlanError
from paceline.simulator.outages.failures import Checkpoints, Interruptions, Recovery
from paceline.simulator.outages.goodput import Goodput, simulate_goodput
from paceline.simulator.outages.intervals import (
    best_interval,
    daly_interval,
    exponential_goodput,
    young_goodput,
    young_interval,
)
from paceline.simulator.workload import Numbers

_AROUND = 8.0  # the shortest and the longest interval, as a factor of the best one
_COUNT = 13  # odd, so that the best one is among them
_SHORTEST_S = 10.0  # where checkpoints cost nothing, the best interval is none


@dataclass(frozen=True)
class Policy:
    """What was found with so many spare hosts."""

    spares: int
    found: Goodput


@dataclass(frozen=True)
class Weeks:
    """What was asked, what was found for each number of spare hosts, and what the formulas say.

    Attributes:
        interruptions, recovery, checkpoints: as given; `recovery` without spares.
        policies: in the order given.
        horizon_s, runs: how long a run is, and how many there were.
        daly, young: goodput of each interval by formula, with interruptions all alike and hosts always there.
    """

    interruptions: Interruptions
    recovery: Recovery
    checkpoints: Checkpoints
    policies: tuple[Policy, ...]
    horizon_s: float
    runs: int
    daly: Numbers
    young: Numbers

    @property
    def waits(self) -> bool:
        """Whether a job may wait for a host."""
        return self.recovery.repair_s > 0 and self.interruptions.broken > 0

    @property
    def young_interval_s(self) -> float:
        """Young's optimum."""
        return young_interval(self.checkpoints.stall_s, self.interruptions.mean_s)

    @property
    def daly_interval_s(self) -> float:
        """Daly's optimum."""
        return daly_interval(self.checkpoints.stall_s, self.interruptions.mean_s)

    @property
    def best_interval_s(self) -> float:
        """The optimum of exponential interruptions."""
        return best_interval(self.checkpoints.stall_s, self.interruptions.mean_s)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; their keys are told in docs/scale.md."""
        return {
            "mean_s": self.interruptions.mean_s,
            "horizon_s": self.horizon_s,
            "runs": self.runs,
            "checkpoint_s": self.checkpoints.stall_s,
            "write_s": self.checkpoints.write_s,
            "formulas": {
                "young_interval_s": self.young_interval_s,
                "daly_interval_s": self.daly_interval_s,
                "best_interval_s": self.best_interval_s,
            },
            "policies": [
                {
                    "spares": policy.spares,
                    "best": self._row(policy.found, policy.found.best),
                    "intervals": [self._row(policy.found, index) for index in range(len(policy.found.interval_s))],
                }
                for policy in self.policies
            ],
        }

    def _row(self, found: Goodput, index: int) -> dict[str, Any]:
        return {
            "interval_s": float(found.interval_s[index]),
            "goodput": float(found.goodput[index]),
            "low": float(found.low[index]),
            "high": float(found.high[index]),
            "error": float(found.error[index]),
            "daly": float(self.daly[index]),
            "young": float(self.young[index]),
            "interruptions": float(found.interruptions[index]),
            "announced": float(found.announced[index]),
            "shares": {str(spent): float(share[index]) for spent, share in found.shares.items()},
        }


def compare(
    interruptions: Interruptions,
    recovery: Recovery,
    checkpoints: Checkpoints,
    *,
    spares: Sequence[int],
    intervals_s: Sequence[float] | None = None,
    horizon_s: float,
    runs: int = 200,
    seed: int = 0,
) -> Weeks:
    """Simulate each number of spare hosts for some intervals; by default those around the best one by formula.

    Raises:
        PlanError: something is not a number that it can be.
    """
    if not spares:
        raise PlanError("name at least one number of spare hosts; 0 waits for repairs.")
    intervals = around_best(interruptions, checkpoints) if intervals_s is None else np.asarray(intervals_s, float)
    policies = [
        Policy(
            number,
            simulate_goodput(
                interruptions,
                replace(recovery, spares=number),
                checkpoints,
                intervals,
                horizon_s=horizon_s,
                runs=runs,
                seed=seed,
            ),
        )
        for number in dict.fromkeys(spares)
    ]
    down = recovery.detect_s + recovery.restart_s
    return Weeks(
        interruptions,
        recovery,
        checkpoints,
        tuple(policies),
        horizon_s,
        runs,
        exponential_goodput(intervals, checkpoints, interruptions.mean_s, down),
        young_goodput(intervals, checkpoints.stall_s, interruptions.mean_s, down),
    )


def around_best(interruptions: Interruptions, checkpoints: Checkpoints) -> Numbers:
    """Return intervals from an eighth to eight times the best by formula, none shorter than it takes to write."""
    least = max(checkpoints.write_s, _SHORTEST_S)
    best = max(best_interval(checkpoints.stall_s, interruptions.mean_s), least)
    intervals = best * np.geomspace(1 / _AROUND, _AROUND, _COUNT)
    return np.unique(np.maximum(intervals, least))
