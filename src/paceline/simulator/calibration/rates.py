"""Coefficients of a device that explain what its probes took, and how sure each of them is.

Logarithms of seconds are compared. Each coefficient has a prior; where probes narrow it little, it stays there and is
said to be unidentified. Peaks are the best that was seen, so that `matmul` says what products reach beyond their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.cluster import Device
from paceline.cluster.rates import Rates
from paceline.simulator.calibration.probes import Family, Probe

Numbers = NDArray[np.float64]
_NOISE = 0.05
"""Error of a good probe, in logarithms."""
_IDENTIFIED = 0.7
"""A coefficient is identified where probes narrow its prior to less than this share."""
_ALIGNED = 8
_CENTRES = {
    "matmul": 0.9,
    "k_half": 20.0,
    "n_half": 20.0,
    "m_half": 20.0,
    "unaligned": 0.8,
    "attention": 0.3,
    "memory": 0.7,
    "launch_s": 3e-6,
}
_WIDTHS = {"matmul": 0.3, "launch_s": 1.0, "unaligned": 0.5}
_WIDTH = 1.0


@dataclass(frozen=True)
class FittedDevice:
    """A device as its probes say it is.

    Attributes:
        device: with its peaks and rates.
        residuals: by the name of each probe, its measured over its estimated seconds, less 1.
        widths: by coefficient, the share of its prior's width that is left.
    """

    device: Device
    residuals: Mapping[str, float]
    widths: Mapping[str, float]

    @property
    def unidentified(self) -> tuple[str, ...]:
        """Coefficients about which this run says nothing, or too little: they stay at their prior."""
        unsure = [name for name, width in self.widths.items() if width > _IDENTIFIED]
        others = [item.name for item in fields(Rates) if item.name not in (*self.widths, "optimizer")]
        return (*unsure, *others)


def fit_device(name: str, seconds: Mapping[Probe, float], memory_bytes: float, source: str) -> FittedDevice:
    """Return the device of some probes.

    Args:
        name: of the product.
        seconds: what probes took.
        memory_bytes: of the device.
        source: how they were taken.
    """
    peak = {
        dtype: max(probe.flops / taken for probe, taken in _of(seconds, Family.PRODUCT) if probe.dtype == dtype)
        for dtype in dict.fromkeys(probe.dtype for probe, _ in _of(seconds, Family.PRODUCT))
    }
    bandwidth = max(probe.nbytes / taken for probe, taken in _of(seconds, Family.TOUCH))
    bare = Device(name, _rounded(peak), memory_bytes, float(f"{bandwidth:.3g}"), Rates(), source)
    names = tuple(_CENTRES)
    centre = np.log(list(_CENTRES.values()))
    width = np.array([_WIDTHS.get(each, _WIDTH) for each in names])
    told = [probe for probe in seconds if probe.family is not Family.UPDATE]
    measured = np.log([seconds[probe] for probe in told])

    def misses(point: Numbers) -> Numbers:
        rates = replace(Rates(), **_by_name(names, point))
        return np.asarray(measured - np.log([estimated(probe, replace(bare, rates=rates)) for probe in told]))

    from scipy.optimize import least_squares  # which takes a while to load

    found = least_squares(
        lambda point: np.concatenate([misses(point) / _NOISE, (point - centre) / width]), centre, loss="soft_l1"
    )
    left = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac))) / width
    rates = replace(Rates(), **_rounded_values(_by_name(names, found.x)))
    device = replace(bare, rates=_with_optimizer(rates, bare, seconds))
    residuals = {
        f"{probe.name}, {probe.dtype}": taken / estimated(probe, device) - 1 for probe, taken in seconds.items()
    }
    return FittedDevice(device, residuals, dict(zip(names, left.tolist(), strict=True)))


def estimated(probe: Probe, device: Device) -> float:
    """Return the seconds of a probe by a device's coefficients."""
    rates = device.rates
    peak = device.peak.get(probe.dtype, max(device.peak.values()))
    touched = probe.nbytes / (device.bandwidth * rates.memory)
    match probe.family:
        case Family.PRODUCT:
            rows, columns, inner = probe.dims
            fill = (1 + rates.m_half / rows) * (1 + rates.n_half / columns) * (1 + rates.k_half / inner)
            if any(size % _ALIGNED for size in probe.dims):
                fill /= rates.unaligned
            return rates.launch_s + probe.flops / (peak * rates.matmul) * fill
        case Family.ATTENTION:
            return rates.launch_s + probe.flops / (peak * rates.attention)
        case Family.UPDATE:
            return rates.launch_s + rates.optimizer * touched
    return rates.launch_s + touched


def _with_optimizer(rates: Rates, bare: Device, seconds: Mapping[Probe, float]) -> Rates:
    """Return the rates with what the update of an optimizer takes over its bytes."""
    for probe, taken in _of(seconds, Family.UPDATE):
        plain = estimated(probe, replace(bare, rates=replace(rates, optimizer=1.0)))
        return replace(rates, optimizer=float(f"{taken / plain:.3g}"))
    return rates


def _by_name(names: Sequence[str], point: Numbers) -> dict[str, Any]:
    return dict(zip(names, np.exp(point).tolist(), strict=True))


def _rounded_values(values: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def _of(seconds: Mapping[Probe, float], family: Family) -> list[tuple[Probe, float]]:
    return [(probe, taken) for probe, taken in seconds.items() if probe.family is family]


def _rounded(peak: Mapping[str, float]) -> dict[str, float]:
    return {dtype: float(f"{rate:.3g}") for dtype, rate in peak.items()}
