"""Coefficients are found again from probes that they explain, and what probes say nothing of is said so."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from paceline.cluster.cluster import Device
from paceline.cluster.collectives import collective_seconds
from paceline.cluster.fabric import Fabric
from paceline.cluster.files import load, save
from paceline.cluster.rates import Rates
from paceline.errors import ClusterError
from paceline.simulator.calibration.calibrate import calibration_of, default_path
from paceline.simulator.calibration.job import Findings
from paceline.simulator.calibration.links import fit_link, level_of
from paceline.simulator.calibration.probes import Family, Probe, Probing, probes
from paceline.simulator.calibration.rates import estimated, fit_device

RATES = replace(
    Rates(), matmul=0.95, k_half=12.0, n_half=30.0, m_half=8.0, unaligned=0.7, attention=0.2, memory=0.5, launch_s=4e-6
)
DEVICE = Device("a core", {"float32": 50e9, "bfloat16": 10e9}, 8e9, 10e9, replace(RATES, optimizer=1.5))
POINTS = {"all_gather": [(1e3, 20e-6), (1e6, 520e-6), (1e7, 5020e-6)], "send": [(1e3, 1e-5), (1e6, 1e-3)]}


def exact(wanted: Device = DEVICE) -> dict[Probe, float]:
    return {probe: estimated(probe, wanted) for probe in probes()}


def findings(ranks: int = 2) -> Findings:
    return Findings(exact(), POINTS if ranks > 1 else {}, ranks, "a core", 8e9, "shm", "shared memory")


def test_coefficients_are_found_again() -> None:
    found = fit_device("a core", exact(), 8e9, "here")
    for probe in probes():
        assert estimated(probe, found.device) == pytest.approx(estimated(probe, DEVICE), rel=0.02)
    for name in ("k_half", "attention", "launch_s", "unaligned"):
        wanted = getattr(DEVICE.rates, name) * (
            1 if name != "attention" else DEVICE.peak["float32"] / found.device.peak["float32"]
        )
        assert getattr(found.device.rates, name) == pytest.approx(wanted, rel=0.1)
    assert max(map(abs, found.residuals.values())) < 0.02


def test_what_probes_say_nothing_of_is_told() -> None:
    without = {probe: taken for probe, taken in exact().items() if probe.family is not Family.ATTENTION}
    found = fit_device("a core", without, 8e9, "here")
    assert "attention" in found.unidentified and "launch_s" not in found.unidentified
    told = {*found.unidentified, *(set(found.widths) - set(found.unidentified)), "optimizer"}
    assert told == {item.name for item in fields(Rates)}
    assert "attention" not in fit_device("a core", exact(), 8e9, "here").unidentified


def test_a_probe_that_fits_badly_shows() -> None:
    seconds = exact()
    odd = next(probe for probe in seconds if probe.family is Family.TOUCH)
    seconds[odd] *= 3
    found = fit_device("a core", seconds, 8e9, "here")
    assert found.residuals[f"{odd.name}, {odd.dtype}"] > 1.0


def test_latency_and_bandwidth_are_found_again() -> None:
    found = fit_link(POINTS["all_gather"])
    assert found.latency_s == pytest.approx(19.5e-6, rel=0.05) and found.per_byte_s == pytest.approx(5e-10, rel=0.01)
    level = level_of(POINTS, 2, Fabric.MEMORY, "here")
    assert level.bandwidth == pytest.approx(1e9, rel=0.01) and level.latency_s == pytest.approx(19.5e-6, rel=0.05)


def test_the_cluster_is_saved_and_answers_as_it_was_measured(tmp_path: Path) -> None:
    made = calibration_of(findings()).cluster
    save(made, tmp_path / "cluster.yaml")
    cluster = load(str(tmp_path / "cluster.yaml"))
    assert cluster.devices == 2 and cluster.levels[0].fabric is Fabric.MEMORY
    assert float(collective_seconds(cluster, "all_gather", 1e6, 2, 1)) == pytest.approx(520e-6)
    assert cluster.groups[0].device.rates.optimizer == pytest.approx(1.5, rel=0.02)


def test_one_rank_has_a_cluster_too(tmp_path: Path) -> None:
    save(calibration_of(findings(ranks=1)).cluster, tmp_path / "cluster.yaml")
    assert load(str(tmp_path / "cluster.yaml")).devices == 1


def test_findings_are_read_as_they_were_written(tmp_path: Path) -> None:
    findings().write(tmp_path / "found.json")
    assert Findings.read(tmp_path / "found.json") == findings()


def test_every_probe_runs_on_a_cpu() -> None:
    probing = Probing(torch.device("cpu"))
    probing.round()
    assert set(probing.seconds) == set(probes())


def test_without_a_cache_a_file_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "off")
    with pytest.raises(ClusterError, match="-o"):
        default_path()
