"""The levels of a network, from the domain of fast links inside a host to the fabric between halls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fabric(StrEnum):
    """What a level is made of, which decides how it gets congested."""

    MEMORY = "memory"
    PCIE = "pcie"
    NVLINK = "nvlink"
    INFINIBAND = "infiniband"
    ROCE = "roce"
    DDC = "ddc"
    TCP = "tcp"
    TORUS = "torus"

    @property
    def hashes_flows(self) -> bool:
        """Whether switches place whole flows by a hash (ECMP), so that some links get two and others none."""
        return self in (Fabric.ROCE, Fabric.TCP)


@dataclass(frozen=True)
class Level:
    """One level of a network.

    Attributes:
        name: for people, such as `nvlink domain`, `leaf`, `spine`.
        fabric: what it is made of.
        devices: how many devices reach each other without leaving it; None: all of the cluster.
        bandwidth: bytes per second that one device can send into it while it receives as much.
        latency_s: seconds that the smallest message takes.
        efficiency: the share of the bandwidth that large collectives reach.
        oversubscription: how many times more the devices below can send than it can carry; 1: it carries all.
        flows: flows per device that a hash distributes, where the fabric does so.
        source: where the figures are from.
    """

    name: str
    fabric: Fabric
    devices: int | None
    bandwidth: float
    latency_s: float
    efficiency: float = 1.0
    oversubscription: float = 1.0
    flows: int = 1
    source: str = ""
