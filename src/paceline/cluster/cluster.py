"""A cluster: devices of one kind or several, the network between them, what they cost and how often they fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.cluster.fabric import Level
from paceline.cluster.rates import Rates
from paceline.errors import ClusterError


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
class Measured:
    """Seconds of a collective by its size, taken on the cluster itself.

    Attributes:
        kind: `all_reduce` or another that `collective_seconds` knows.
        size: ranks of the group, consecutive ones.
        points: bytes of the whole tensor and seconds, ascending.
    """

    kind: str
    size: int
    points: tuple[tuple[float, float], ...]


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
        measured: collectives taken on the cluster itself, which count more than what levels say.
    """

    name: str
    groups: tuple[Group, ...]
    levels: tuple[Level, ...]
    price_per_device_hour: float | None = None
    failures_per_device_hour: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)
    measured: tuple[Measured, ...] = ()

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return sum(group.devices for group in self.groups)

    @property
    def devices_per_host(self) -> int:
        """How many devices share a host, or the domain of fast links that takes its place."""
        inside = [level.devices or self.devices for level in self.levels if level.fabric.is_inside_host]
        return min(inside[-1] if inside else 1, self.devices)

    @property
    def hosts(self) -> int:
        """How many hosts there are, the last of them perhaps not full."""
        return -(-self.devices // self.devices_per_host)

    @property
    def slowest(self) -> Group:
        """The group whose devices take longest for a product in bfloat16, for which all others wait."""

        def rate(group: Group) -> float:
            peak = group.device.peak
            return peak.get("bfloat16", max(peak.values())) / group.slowdown

        return min(self.groups, key=rate)

    def of(self, devices: int) -> Cluster:
        """Return the cluster with so many devices: the first of them, or more of the only kind it has.

        Raises:
            ClusterError: the outermost level does not hold as many, or there are several groups and it is not said
                which of them is to grow.
        """
        limit = self.levels[-1].devices
        if devices < 1 or (limit is not None and devices > limit):
            most = "any number of" if limit is None else f"1 to {limit}"
            raise ClusterError(f"cluster '{self.name}' has {most} devices, not {devices}.")
        if devices > self.devices and len(self.groups) > 1:
            raise ClusterError(
                f"cluster '{self.name}' has {self.devices} devices in {len(self.groups)} groups; for {devices}, write "
                "into its file which group has more."
            )
        if len(self.groups) == 1:
            return replace(self, groups=(replace(self.groups[0], devices=devices),))
        groups, left = [], devices
        for group in self.groups:
            if left:
                groups.append(replace(group, devices=min(left, group.devices)))
                left -= groups[-1].devices
        return replace(self, groups=tuple(groups))
