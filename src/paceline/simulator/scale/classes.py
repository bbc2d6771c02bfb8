"""Replicas that behave alike: of all those of a pipeline, only one of each class has to be simulated.

Ranks of a stage stand next to each other, replica after replica. Where the devices of a cluster come in groups, of
other kinds or slower, a replica's class is which groups each of its stages lies on. Groups are few, so classes are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import NormalDist

from paceline.cluster.cluster import Cluster, Group
from paceline.simulator.layouts import Layouts

Class = tuple[tuple[int, ...], ...]
"""For each rank of the pipeline, on which groups of the cluster its devices are, of groups alike the first one."""


def classes(cluster: Cluster, layout: Layouts) -> dict[Class, int]:
    """Return the classes of replicas of one layout, each with how many replicas it has.

    Args:
        cluster: of as many devices as the layout needs.
        layout: one.
    """
    ranks, replicas = int(layout.pp[0]), int(layout.replicas[0])
    inner = int(layout.devices[0]) // (ranks * replicas)
    ends = list(accumulate(group.devices for group in cluster.groups))
    alike = [_alike(cluster.groups, group) for group in cluster.groups]
    of_stage = replicas * inner
    starts = {0}
    for end in ends[:-1]:
        first = (end % of_stage) // inner  # the replica that a boundary goes through, or that begins there
        starts |= {first, first + 1} if end % inner else {first}
    ordered = sorted(start for start in starts if start < replicas)
    counts: Counter[Class] = Counter()
    for start, stop in zip(ordered, [*ordered[1:], replicas], strict=True):
        firsts = [rank * of_stage + start * inner for rank in range(ranks)]
        touched = (_touched(ends, first, first + inner) for first in firsts)
        counts[tuple(tuple(sorted({alike[number] for number in numbers})) for numbers in touched)] += stop - start
    return dict(counts)


def _alike(groups: Sequence[Group], group: Group) -> int:
    """Return the first group whose devices and links are as those of a group."""
    return next(number for number, each in enumerate(groups) if replace(each, devices=group.devices) == group)


def _touched(ends: Sequence[int], first: int, stop: int) -> list[int]:
    """Return the groups that devices from `first` to before `stop` belong to."""
    begins = [0, *ends[:-1]]
    return [
        number for number, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < stop and first < end
    ]


def expected_maximum(count: int) -> float:
    """Return the expected maximum of so many standard normal numbers.

    G. Blom, "Statistical Estimates and Transformed Beta-Variables", 1958: the quantile (n - a) / (n + 1 - 2 a) with a
    of 0.375, within 0.03 for any number and much closer for many.
    """
    if count < 2:
        return 0.0
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def slowest_factor(count: int, jitter: float) -> float:
    """Return by how much the slowest of some devices is expected to be slower than their mean.

    Args:
        count: of devices that wait for each other.
        jitter: standard deviation of a device's speed in a step, as a share.
    """
    return max(1.0 + jitter * expected_maximum(count), math.nextafter(0, 1))
