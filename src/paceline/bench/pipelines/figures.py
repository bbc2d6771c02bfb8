"""From what rounds and ranks say to the figures of the pipelines benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.pipelines.contestants import Schedule, Setting
from paceline.bench.statistics import spread
from paceline.schedule import Account, Edges, Op, communicate, make, validate
from paceline.schedule.formulas import ideal_bubble

_PARTS = ("computing", "sending", "receiving")


def times(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the quartiles and the minimum of the rounds."""
    return {**spread(seconds).to_json(), "min": min(seconds)}


def compared(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the same of ours / theirs, round by round, and `fastest`: the ratio of the fastest rounds of each."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {**times(pairs), "fastest": min(ours) / min(theirs)}


def ideal(setting: Setting, schedule: Schedule) -> float:
    """Return the bubble that the formula says."""
    return ideal_bubble(schedule.kind, setting.ranks, setting.micro_batches, chunks=schedule.chunks)


def bound(setting: Setting, schedule: Schedule, serial: Sequence[float]) -> list[float]:
    """Return serial's time divided among ranks that are idle for no more than the bubble: S/P (m + P - 1)/m of 1F1B."""
    return [seconds / setting.ranks / (1 - ideal(setting, schedule)) for seconds in serial]


def of_least(ours: Sequence[float], least: Sequence[float]) -> dict[str, float]:
    """Return how long a step takes at least, the median of the rounds, and how ours compares with it."""
    return {"least_s": times(least)["median"], **compared(ours, least)}


@dataclass(frozen=True)
class Seen:
    """What ranks of one schedule were seen to do.

    Attributes:
        setting, schedule: of which.
        ranks: what `pipelines_watch.watch` found on each, of this schedule.
        control: and of that whose control it has.
    """

    setting: Setting
    schedule: Schedule
    ranks: Sequence[Mapping[str, Any]]
    control: Sequence[Mapping[str, Any]]

    @property
    def account(self) -> Account:
        """What the schedule takes where each computation takes as long as in the control, and messages no time."""
        durations = {
            (Op(key.split()[0]), int(key.split()[1])): seconds
            for rank in self.control
            for key, seconds in rank["durations"].items()
        }
        edges = Edges(*(frozenset((a, b) for a, b in self.ranks[0][key]) for key in ("forward", "backward")))
        schedule = make(self.schedule, self.setting.ranks, self.setting.micro_batches, chunks=self.setting_chunks)
        return validate(communicate(schedule, edges), edges, durations)

    @property
    def setting_chunks(self) -> int:
        """Stages per rank, as `make` is told."""
        return self.schedule.chunks

    @property
    def stretch(self) -> float:
        """By how much more than its busiest rank computes the schedule takes at least."""
        account = self.account
        return account.makespan / max(account.busy)

    def least(self, control: Sequence[float], optimizer: Sequence[float]) -> list[float]:
        """Return how long steps take without communication: the control, stretched, and what its optimizer takes."""
        return [(whole - own) * self.stretch + own for whole, own in zip(control, optimizer, strict=True)]

    def bubble(self) -> dict[str, float]:
        """Return the share of all ranks' time in which they do not compute: by formula, by durations, and measured."""
        shares: dict[str, list[float]] = {part: [] for part in _PARTS}
        for one_of_each in zip(*(rank["rounds"] for rank in self.ranks), strict=True):
            whole = max(found["ended"] for found in one_of_each) - min(found["began"] for found in one_of_each)
            for part in _PARTS:
                shares[part].append(sum(found[part] for found in one_of_each) / (whole * len(one_of_each)))
        return {
            "formula": ideal(self.setting, self.schedule),
            "of_durations": self.account.bubble,
            **times([1 - share for share in shares["computing"]]),
            **{part: spread(shares[part]).median for part in _PARTS},
        }

    def activations(self) -> dict[str, list[int]]:
        """Return by stage how many micro-batches are in flight at most, and their bytes: predicted and measured."""
        saved, peaks = self.ranks[0]["saved"], self.account.stage_peaks
        held = {int(stage): count for rank in self.ranks for stage, count in rank["held"].items()}
        return {
            "micro_batches": list(peaks),
            "predicted": [count * peak for count, peak in zip(saved, peaks, strict=True)],
            "measured": [held[stage] for stage in range(len(saved))],
        }
