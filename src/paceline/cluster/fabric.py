"""The levels of a network, from the domain of fast links inside a host to the fabric between halls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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

    @property
    def is_inside_host(self) -> bool:
        """Whether devices reach each other over it without network cards."""
        return self in (Fabric.MEMORY, Fabric.PCIE, Fabric.NVLINK)


@dataclass(frozen=True)
class Level:
    """One level of a network.

    Attributes:
        name: for people, such as `nvlink`, `leaf`, `spine`.
        fabric: what it is made of.
        devices: how many consecutive devices reach each other without leaving it; None: all of the cluster.
        bandwidth: bytes per second that each device can send into it while it receives as much, when all do.
        latency_s: seconds of each step of a collective, in which a rank hears from another.
        start_s: seconds that a collective takes before its first step.
        efficiency: the share of the bandwidth that large collectives of all its devices reach.
        small_groups: the share that groups of fewer members reach, by their number; a straight line in between. Two
            members of a mesh without switches have few links to each other.
        oversubscription: how many times more the devices below can send than it can carry; 1: it carries all.
        nics_per_device: network cards for each device; with less than one, a device alone can send more than its
            share: what a card carries.
        flows: flows per device that a hash distributes, where the fabric does so.
        paths: equal links out of a domain below, among which a hash chooses; None: as many as there are cards below,
            less by the oversubscription, where the level below is made of switches too, and one where it is a host.
        rails: cards of a host that lead to different switches of this level; data for another rail is first handed
            over inside the host.
        in_switch: the share of the bandwidth that an all-reduce reaches whose sums are made by switches (NVLink SHARP,
            InfiniBand SHARP); None: they make none.
        in_switch_s: seconds that such an all-reduce takes besides its bytes, after the start.
        eager: the share of the large collectives' bandwidth that messages sent without a handshake reach.
        handshake_s: further seconds of each step of messages that are sent with one, at full bandwidth.
        port_buffer: bytes that a switch keeps for a port, where it drops what comes on top (TCP); None: unknown.
        axes: of a torus: how many.
        source: where the figures are from.
    """

    name: str
    fabric: Fabric
    devices: int | None
    bandwidth: float
    latency_s: float
    start_s: float = 0.0
    efficiency: float = 1.0
    small_groups: Mapping[int, float] = field(default_factory=dict)
    oversubscription: float = 1.0
    nics_per_device: float = 1.0
    flows: int = 1
    paths: int | None = None
    rails: int = 1
    in_switch: float | None = None
    in_switch_s: float = 0.0
    eager: float = 1.0
    handshake_s: float = 0.0
    port_buffer: float | None = None
    axes: int = 3
    source: str = ""

    @property
    def alone(self) -> float:
        """Bytes per second that a device can send while its neighbours do not."""
        return self.bandwidth / min(1.0, self.nics_per_device)
