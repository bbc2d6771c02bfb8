"""From a job's findings to a cluster, with what is left unexplained and what is not known."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.cluster import Cluster, Group
from paceline.cluster.fabric import Fabric, Level
from paceline.errors import ClusterError
from paceline.runtime.job.launch import launch
from paceline.runtime.program_cache import default_directory
from paceline.simulator.calibration.job import Findings, Job
from paceline.simulator.calibration.links import FittedLink, curves_of, fit_link, level_of
from paceline.simulator.calibration.rates import FittedDevice, fit_device

_FABRICS = {"shm": Fabric.MEMORY, "gloo": Fabric.TCP, "nccl": Fabric.NVLINK}
_FILE = "cluster.yaml"
_LIMIT_S = 600.0
_NAME = "this-machine"


@dataclass(frozen=True)
class Calibration:
    """A machine as it was measured.

    Attributes:
        cluster: ready to be saved.
        findings: what it was made of.
        device: the coefficients, with their residuals.
        links: latency and seconds of a byte of each collective, with their residuals.
    """

    cluster: Cluster
    findings: Findings
    device: FittedDevice
    links: Mapping[str, FittedLink]


def default_path() -> Path:
    """Return where the cluster of this machine is kept: beside cached programs.

    Raises:
        ClusterError: nothing is cached, by `PACELINE_CACHE=off`.
    """
    directory = default_directory()
    if directory is None:
        raise ClusterError("PACELINE_CACHE is off, so there is no place for a cluster file; name one with -o.")
    return directory / _FILE


def calibrate(ranks: int, *, device: str = "auto", backend: str = "auto") -> Calibration:
    """Measure this machine with some ranks at work, one thread each; a minute, about.

    Raises:
        LaunchError, RankFailed: ranks cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-calibrate-") as folder:
        job = Job(file=str(Path(folder) / "found.json"), device=device, backend=backend)
        environment = {"OMP_NUM_THREADS": "1"} if device != "cuda" else {}
        launch(
            "paceline.simulator.calibration.job:measure",
            job.to_json(),
            ranks,
            environment=environment,
            timeout_s=_LIMIT_S,
        )
        return calibration_of(Findings.read(Path(job.file)))


def calibration_of(findings: Findings) -> Calibration:
    """Return what a job's findings say of the machine."""
    source = f"paceline calibrate --ranks {findings.ranks}"
    device = fit_device(findings.device, findings.seconds, findings.memory_bytes, source)
    fabric = _FABRICS.get(findings.transport, Fabric.TCP)
    if findings.points:
        level = level_of(findings.points, findings.ranks, fabric, f"{source}, through {findings.words}")
    else:  # one rank has no neighbours: its own memory is all there is
        level = Level(Fabric.MEMORY.value, Fabric.MEMORY, None, device.device.bandwidth, 1e-6, source=source)
    cluster = Cluster(
        name=_NAME,
        groups=(Group(findings.ranks, device.device),),
        levels=(level,),
        measured=curves_of(findings.points, findings.ranks),
        sources={"measured": source} if findings.points else {},
    )
    return Calibration(cluster, findings, device, {kind: fit_link(points) for kind, points in findings.points.items()})
