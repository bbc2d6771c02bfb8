"""What a file of a cluster may say, checked key by key, and the nouns it stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Self, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from paceline.cluster.cluster import Cluster, Device, Group, Measured
from paceline.cluster.collectives import check_kind
from paceline.cluster.fabric import Fabric, Level
from paceline.cluster.rates import Rates
from paceline.cluster.units import Unit, read
from paceline.documents.complaints import complaint
from paceline.errors import ClusterError


def _reads(unit: Unit) -> Callable[[Any], float | None]:
    def of(value: Any) -> float | None:
        try:
            return None if value is None else read(value, unit)
        except ClusterError as error:
            raise complaint(str(error)) from error

    return of


Positive = Field(gt=0)
Bandwidth = Annotated[float, BeforeValidator(_reads(Unit.BYTES_PER_SECOND)), Positive]
Bytes = Annotated[float, BeforeValidator(_reads(Unit.BYTES)), Positive]
Seconds = Annotated[float, BeforeValidator(_reads(Unit.SECONDS))]
Flops = Annotated[float, BeforeValidator(_reads(Unit.FLOPS)), Positive]
Count = Annotated[int, Field(ge=1, strict=True)]
Share = Annotated[float, Field(gt=0, le=1)]
Times = Annotated[float, Field(ge=1)]


class Section(BaseModel):
    """A mapping of the file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _rates_section() -> type[Section]:
    """Return a section with a key for each coefficient that `Rates` has."""
    hints = get_type_hints(Rates)
    keys: dict[str, Any] = {item.name: (hints[item.name], item.default) for item in dataclasses.fields(Rates)}
    return create_model("RatesSection", __base__=Section, **keys)


RatesSection: Any = _rates_section()


class DeviceSection(Section):
    """One kind of device; see `paceline.cluster.cluster.Device`."""

    name: str
    peak: dict[str, Flops]
    memory: Bytes
    bandwidth: Bandwidth
    rates: RatesSection = RatesSection()
    source: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.peak:
            raise complaint("a device has a peak for at least one type, such as 'bfloat16: 312 TFLOP/s'.", "peak")
        return self

    def noun(self) -> Device:
        """Return what it stands for."""
        rates = Rates(**self.rates.model_dump())
        return Device(self.name, dict(self.peak), self.memory, self.bandwidth, rates, self.source)


class GroupSection(Section):
    """Devices of one kind that stand next to each other; see `paceline.cluster.cluster.Group`."""

    devices: Count
    device: DeviceSection
    slowdown: Times = 1.0
    link_slowdown: Times = 1.0


class SlowSection(Section):
    """One device that computes slower than its kind, or whose links are slower."""

    rank: Annotated[int, Field(ge=0, strict=True)]
    slowdown: Times = 1.0
    link_slowdown: Times = 1.0


WAITS = {"latency": "latency_s", "start": "start_s", "handshake": "handshake_s", "in_switch_latency": "in_switch_s"}


class LevelSection(Section):
    """One level of the network; see `paceline.cluster.fabric.Level`.

    Attributes:
        bandwidth: of each device, when all send; in its place, `nic` may say what each network card carries.
    """

    name: str
    fabric: Fabric
    devices: Count | None = None
    bandwidth: Bandwidth | None = None
    nic: Bandwidth | None = None
    nics_per_device: Annotated[float, Positive] = 1.0
    latency: Seconds
    start: Seconds = 0.0
    efficiency: Share = 1.0
    small_groups: dict[Annotated[int, Field(ge=2, strict=True)], Share] = {}
    oversubscription: Times = 1.0
    flows: Count = 1
    paths: Count | None = None
    rails: Count = 1
    in_switch: Share | None = None
    in_switch_latency: Seconds = 0.0
    eager: Share = 1.0
    handshake: Seconds = 0.0
    port_buffer: Bytes | None = None
    axes: Count = 3
    source: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.bandwidth is None) == (self.nic is None):
            raise complaint(
                f"level '{self.name}' needs either 'bandwidth', of each device, or 'nic', of each of its network cards."
            )
        return self

    def noun(self) -> Level:
        """Return what it stands for."""
        given = self.model_dump(exclude={"nic", "bandwidth", *WAITS})
        each = self.bandwidth if self.nic is None else self.nic * self.nics_per_device
        assert each is not None
        return Level(**given, **{noun: getattr(self, key) for key, noun in WAITS.items()}, bandwidth=each)


class MeasuredSection(Section):
    """A collective by its size; see `paceline.cluster.cluster.Measured`."""

    collective: str
    size: Annotated[int, Field(ge=2, strict=True)]
    points: tuple[tuple[Bytes, Annotated[Seconds, Positive]], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            check_kind(self.collective)
        except ClusterError as error:
            raise complaint(str(error), "collective") from error
        if len({nbytes for nbytes, _ in self.points}) < len(self.points):
            raise complaint("each size is measured once; two points have the same number of bytes.", "points")
        return self


class ClusterSection(Section):
    """A file of a cluster; see `paceline.cluster.cluster.Cluster`.

    Attributes:
        devices, device: of a cluster whose devices are alike; in their place, `groups` may say more.
        slow: single devices of these that differ.
    """

    name: str
    devices: Count | None = None
    device: DeviceSection | None = None
    groups: tuple[GroupSection, ...] = ()
    slow: tuple[SlowSection, ...] = ()
    levels: tuple[LevelSection, ...] = Field(min_length=1)
    price_per_device_hour: Annotated[float, Field(ge=0)] | None = None
    failures_per_device_hour: Annotated[float, Field(ge=0)] = 0.0
    sources: dict[str, str] = {}
    measured: tuple[MeasuredSection, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.groups) == (self.device is not None) or (self.device is None) != (self.devices is None):
            raise complaint("a cluster has either 'devices', how many, and 'device', their kind, or 'groups' of both.")
        total = self.devices or sum(group.devices for group in self.groups)
        _check_levels(self.levels, total)
        for index, slow in enumerate(self.slow):
            if slow.rank >= total:
                raise complaint(f"rank {slow.rank} is slow in a cluster of {total} devices.", f"slow.{index}.rank")
        return self

    def noun(self) -> Cluster:
        """Return what it stands for."""
        if self.device is not None and self.devices is not None:
            groups = [Group(self.devices, self.device.noun())]
        else:
            groups = [Group(it.devices, it.device.noun(), it.slowdown, it.link_slowdown) for it in self.groups]
        for slow in self.slow:
            groups = _with_slow(groups, slow)
        return Cluster(
            self.name,
            tuple(groups),
            tuple(level.noun() for level in self.levels),
            self.price_per_device_hour,
            self.failures_per_device_hour,
            dict(self.sources),
            tuple(Measured(it.collective, it.size, tuple(sorted(it.points))) for it in self.measured),
        )


def _check_levels(levels: tuple[LevelSection, ...], total: int) -> None:
    inner = 1
    names = [level.name for level in levels]
    for index, level in enumerate(levels):
        last = index == len(levels) - 1
        if level.name in names[:index]:
            raise complaint(f"two levels are called '{level.name}'; name each for itself.", f"levels.{index}.name")
        if level.fabric is Fabric.TORUS and index:
            raise complaint(
                f"level '{level.name}' is a torus of what the level before it holds; only the first level may be one.",
                f"levels.{index}.fabric",
            )
        if level.devices is None and not last:
            raise complaint(
                f"level '{level.name}' has no 'devices'; only the last level may hold all there are.", f"levels.{index}"
            )
        if level.devices is not None and (level.devices % inner or (index and level.devices == inner)):
            raise complaint(
                f"level '{level.name}' holds {level.devices} devices, which is no multiple of the {inner} that each "
                "domain of the level before it holds.",
                f"levels.{index}.devices",
            )
        inner = level.devices or inner
    outermost = levels[-1].devices
    if outermost is not None and total > outermost:
        raise complaint(f"the last level holds {outermost} devices, and the cluster has {total}.", "devices")


def _with_slow(groups: list[Group], slow: SlowSection) -> list[Group]:
    """Cut the device of a rank out of the group it stands in."""
    found: list[Group] = []
    first = 0
    for group in groups:
        before, after = slow.rank - first, first + group.devices - slow.rank - 1
        if before < 0 or after < 0:
            found.append(group)
        else:
            one = dataclasses.replace(
                group,
                devices=1,
                slowdown=group.slowdown * slow.slowdown,
                link_slowdown=group.link_slowdown * slow.link_slowdown,
            )
            found += [dataclasses.replace(group, devices=before)] if before else []
            found += [one]
            found += [dataclasses.replace(group, devices=after)] if after else []
        first += group.devices
    return found
