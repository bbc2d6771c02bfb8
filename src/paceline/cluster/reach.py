"""Which levels of the network groups of ranks cross, and what each level gives them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.cluster import Cluster
from paceline.cluster.fabric import Fabric, Level
from paceline.cluster.hashing import fullest
from paceline.cluster.torus import ways

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Crossing:
    """What groups have to do with one level, for each group.

    Attributes:
        level: the level.
        inside: members of a group in a domain of the level below, among whom it need not be entered.
        members: of a group in a domain of this level.
        domains: of the level below that it joins; 1: it is not crossed.
        rate: bytes per second that a group can send out of one of these domains.
        efficiency: the share of the bandwidth that is in `rate`.
        steps: how often its latency is waited for where data visit one member after the other.
        crowding: by how much an all-to-all takes longer than its bytes over the rate.
    """

    level: Level
    inside: Numbers
    members: Numbers
    domains: Numbers
    rate: Numbers
    efficiency: Numbers
    steps: Numbers
    crowding: Numbers

    @property
    def crossed(self) -> NDArray[np.bool_]:
        """Whether a group crosses the level at all."""
        return self.domains > 1


@dataclass(frozen=True)
class Groups:
    """Groups of `size` ranks, consecutive members `stride` ranks apart.

    Attributes:
        sharing: how many groups send through the links of one host at once; no more than there are.
        peers: members that each member sends to at once: 1 in a ring, all others in an all-to-all.
    """

    size: Numbers
    stride: Numbers
    sharing: Numbers
    peers: Numbers


def crossings(cluster: Cluster, groups: Groups) -> list[Crossing]:
    """Return what groups have to do with each level, innermost first.

    Where some groups of a layout fit into a domain and others straddle two, all are taken to straddle: a step waits for
    the slowest.
    """
    found: list[Crossing] = []
    inside, below = np.ones_like(groups.size), 1
    for level in cluster.levels:
        holds = min(level.devices or cluster.devices, cluster.devices)
        members = groups.size if holds == cluster.devices else np.maximum(inside, _members(groups, holds))
        lower = found[-1].level if found else None
        efficiency = _efficiency(level, members)
        rate = _rate(cluster, level, _paths(level, lower, below), below, inside, groups) * efficiency
        steps = groups.size / inside - groups.size / members
        crowding = np.ones_like(members)
        if level.fabric is Fabric.TORUS:
            torus = ways(holds, level.axes, groups.size, groups.stride)
            rate = rate * torus.links / (2 * level.axes)
            steps = torus.hops
            crowding = torus.crowding * torus.links
        domains = np.ceil(members / inside)
        found.append(Crossing(level, inside, members, domains, rate, efficiency, steps, crowding))
        inside, below = members, holds
    return found


def _members(groups: Groups, holds: int) -> Numbers:
    """Return how many members of a group a domain of so many devices holds."""
    reach = groups.size * groups.stride
    is_contained = (reach <= holds) & (holds % np.minimum(reach, holds) == 0)
    # A domain that holds no whole number of groups cuts one of them in two.
    cut = np.clip(np.floor(holds / groups.stride), 1, np.maximum(groups.size - 1, 1))
    return np.where(is_contained, groups.size, cut)


def _rate(cluster: Cluster, level: Level, paths: int, below: int, inside: Numbers, groups: Groups) -> Numbers:
    """Return bytes per second that a group can send from a domain below into the level."""
    capacity = below * level.bandwidth / level.oversubscription
    # Groups of a larger stride than a host stand side by side in it and in the other hosts of the domain.
    host = np.minimum(groups.stride, cluster.devices_per_host)
    sending = np.minimum(groups.sharing, host) / host
    sharing = np.maximum(1.0, sending * np.minimum(groups.stride, below))
    share = capacity / sharing
    if paths > 1:
        flows = inside * level.flows * groups.peers
        share = np.minimum(share, capacity / paths * flows / fullest(flows * sharing, np.full_like(flows, paths)))
    slowest = max(group.link_slowdown for group in cluster.groups)
    return np.minimum(share, inside * level.alone) / slowest


def _efficiency(level: Level, members: Numbers) -> Numbers:
    """Return the share of the bandwidth that large collectives reach, by how many members take part."""
    points = dict(sorted(level.small_groups.items()))
    if level.devices is not None:
        points[level.devices] = level.efficiency
    if not points:
        return np.full_like(members, level.efficiency)
    share: Numbers = np.interp(members, list(points), list(points.values()))
    return share


def _paths(level: Level, lower: Level | None, below: int) -> int:
    """Return how many equal links a hash chooses from where data leave a domain of the level below."""
    if not level.fabric.hashes_flows or lower is None:
        return 1
    if level.paths is not None:
        return level.paths
    # A card of a host has one link; a switch has as many up as down, or fewer.
    return 1 if lower.fabric.is_inside_host else max(1, round(below * level.nics_per_device / level.oversubscription))
