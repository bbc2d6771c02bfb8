"""A cluster: devices of one kind or several, the network between them, what they cost and how often they fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.cluster.fabric import Level
from paceline.cluster.rates import Rates


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: of the product.
        peak: floating-point operations per second of dense products, by the name of the type (`float32`, `bfloat16`).
        memory_bytes: what programs may use.
        bandwidth: bytes per second of its memory.
        rates: what programs reach of these peaks, calibrated.
        source: where the figures are from.
    """

    name: str
    peak: Mapping[str, float]
    memory_bytes: float
    bandwidth: float
    rates: Rates
    source: str = ""


@dataclass(frozen=True)
class Group:
    """Devices that stand next to each other in the order of ranks.

    Attributes:
        devices: how many.
        device: their kind.
        slowdown: by how much they compute slower than their kind does.
        link_slowdown: by how much their links are slower than the levels say.
    """

    devices: int
    device: Device
    slowdown: float = 1.0
    link_slowdown: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """Devices and the network between them.

    Attributes:
        name: what it is found by.
        groups: in the order of ranks; one, where all devices are alike.
        levels: innermost first; the last one holds all devices.
        price_per_device_hour: in US dollars; None where it is unknown.
        failures_per_device_hour: interruptions of a job, for each device that it runs on.
        sources: where further figures are from, by what they say.
    """

    name: str
    groups: tuple[Group, ...]
    levels: tuple[Level, ...]
    price_per_device_hour: float | None = None
    failures_per_device_hour: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return sum(group.devices for group in self.groups)

    @property
    def slowest(self) -> Group:
        """The group whose devices take longest for a product in bfloat16, for which all others wait."""

        def rate(group: Group) -> float:
            peak = group.device.peak
            return peak.get("bfloat16", max(peak.values())) / group.slowdown

        return min(self.groups, key=rate)
