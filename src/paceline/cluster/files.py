"""Clusters as files: YAML that people write, read safely and checked key by key, and written back exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from paceline.cluster.cluster import Cluster, Device, Group
from paceline.cluster.described import WAITS, ClusterSection
from paceline.cluster.fabric import Level
from paceline.cluster.rates import Rates
from paceline.cluster.units import Unit, write
from paceline.documents.complaints import complaints
from paceline.documents.source import Genre, Source, read_source
from paceline.errors import ClusterError, nearest

_CLUSTER = Genre("cluster", ClusterError, "keys such as 'device:' and 'levels:'", "there is no cluster ")
_DEVICE = Genre("device", ClusterError, "keys such as 'peak:' and 'memory:'", "there is no device ")


def names() -> list[str]:
    """Return the names of the clusters that come with the package."""
    return sorted(path.stem for path in _shipped().glob("*.yaml"))


def devices() -> list[str]:
    """Return the names of the kinds of devices that come with the package."""
    return sorted(path.stem for path in (_shipped() / "devices").glob("*.yaml"))


def load(name_or_path: str | Path) -> Cluster:
    """Read a cluster: one that comes with the package, by its name, or a file.

    Raises:
        ClusterError: there is none, or it is refused; a line for each fault says where it was written.
    """
    path = _path(str(name_or_path))
    source = read_source(path, _CLUSTER)
    source.values.setdefault("name", path.stem)
    _resolve(source, path.parent)
    try:
        return ClusterSection.model_validate(source.values).noun()
    except ValidationError as error:
        raise ClusterError("\n".join(complaints(error, ClusterSection, source))) from error


def save(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster where `load` reads it back as the same cluster."""
    Path(path).write_text(to_yaml(cluster), encoding="utf-8")


def to_yaml(cluster: Cluster) -> str:
    """Return a cluster as the text of its file, devices written out."""
    values: dict[str, Any] = {"name": cluster.name}
    if len(cluster.groups) == 1 and cluster.groups[0] == Group(cluster.devices, cluster.groups[0].device):
        values |= {"devices": cluster.devices, "device": _device_values(cluster.groups[0].device)}
    else:
        values["groups"] = [_group_values(group) for group in cluster.groups]
    values["levels"] = [_level_values(level) for level in cluster.levels]
    if cluster.price_per_device_hour is not None:
        values["price_per_device_hour"] = cluster.price_per_device_hour
    if cluster.failures_per_device_hour:
        values["failures_per_device_hour"] = cluster.failures_per_device_hour
    if cluster.sources:
        values["sources"] = dict(cluster.sources)
    if cluster.measured:
        values["measured"] = [
            {"collective": it.kind, "size": it.size, "points": [list(point) for point in it.points]}
            for it in cluster.measured
        ]
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Safe YAML in which the same device is written out each time, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _shipped() -> Path:
    return Path(str(resources.files("paceline"))) / "clusters"


def _path(given: str) -> Path:
    if given.endswith((".yaml", ".yml")) or "/" in given:
        return Path(given).expanduser()
    known = names()
    if given not in known:
        raise ClusterError(
            f"there is no cluster '{given}'.{nearest(given, known)} Known: {', '.join(known)}; or give the path of a "
            "file that ends in .yaml."
        )
    return _shipped() / f"{given}.yaml"


def _resolve(source: Source, folder: Path) -> None:
    """Put the descriptions of devices that are named in the place of their names."""
    places: list[tuple[dict[str, Any], tuple[str | int, ...]]] = [(source.values, ("device",))]
    groups = source.values.get("groups")
    if isinstance(groups, list):
        places += [(it, ("groups", index, "device")) for index, it in enumerate(groups) if isinstance(it, dict)]
    for section, place in places:
        given = section.get("device")
        if not isinstance(given, str):
            continue
        found = _device_source(given, folder, source.place(place))
        section["device"] = found.values
        source.places |= {(*place, *key): where for key, where in found.places.items()}


def _device_source(given: str, folder: Path, place: str) -> Source:
    folders = (folder / "devices", folder, _shipped() / "devices")
    for path in (folder / given, *(each / f"{given}.yaml" for each in folders)):
        if path.suffix == ".yaml" and path.is_file():
            found = read_source(path, _DEVICE)
            found.values.setdefault("name", path.stem)
            return found
    known = sorted({path.stem for path in folders[0].glob("*.yaml")} | set(devices()))
    raise ClusterError(
        f"{place}: there is no device '{given}'.{nearest(given, known)} Known: {', '.join(known)}; or write its peak, "
        "memory and bandwidth here."
    )


def _group_values(group: Group) -> dict[str, Any]:
    values: dict[str, Any] = {"devices": group.devices, "device": _device_values(group.device)}
    return values | _changed(group, Group(0, group.device), ("slowdown", "link_slowdown"))


def _device_values(device: Device) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": device.name,
        "peak": {name: write(rate, Unit.FLOPS) for name, rate in device.peak.items()},
        "memory": write(device.memory_bytes, Unit.BYTES),
        "bandwidth": write(device.bandwidth, Unit.BYTES_PER_SECOND),
        "rates": _changed(device.rates, Rates(), (item.name for item in dataclasses.fields(Rates))),
        "source": device.source,
    }
    return {key: value for key, value in values.items() if value not in ({}, "")}


def _level_values(level: Level) -> dict[str, Any]:
    plain = Level(level.name, level.fabric, level.devices, level.bandwidth, level.latency_s)
    values: dict[str, Any] = {
        "name": level.name,
        "fabric": level.fabric.value,
        "devices": level.devices,
        "bandwidth": write(level.bandwidth, Unit.BYTES_PER_SECOND),
    }
    for key, noun in WAITS.items():
        if key == "latency" or getattr(level, noun):
            values[key] = write(getattr(level, noun), Unit.SECONDS)
    others = (item.name for item in dataclasses.fields(Level) if not item.name.endswith("_s"))
    return {key: value for key, value in (values | _changed(level, plain, others)).items() if value is not None}


def _changed(noun: Any, plain: Any, keys: Iterable[str]) -> dict[str, Any]:
    """Return what a noun says beyond its defaults."""
    return {key: getattr(noun, key) for key in keys if getattr(noun, key) != getattr(plain, key)}
