"""Finds the coefficients of a device from measured steps: least squares of logarithms, held near what is plausible.

Errors are relative, so logarithms are compared; a soft L1 loss keeps single outliers from deciding; and each
coefficient has a prior, since no set of runs shows all of them. What the runs do not show stays at its prior, and is
said so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.cluster.rates import Rates
from paceline.simulator.closed_form.kriging import coordinates
from paceline.simulator.closed_form.step_seconds import step_demand, step_parts
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Numbers, Workload

DIGITS = 3
"""Of coordinates and residuals that a profile keeps: more would be noise."""

NOISE = 0.1
"""Error of a good row, in logarithms: what residuals are measured in."""

IDENTIFIED = 0.7
"""A coefficient is identified where rows narrow its prior to less than this share."""


@dataclass(frozen=True)
class Prior:
    """What is known of a coefficient before any row: a log-normal distribution.

    Attributes:
        centre: its median.
        width: standard deviation of its logarithm.
    """

    centre: float
    width: float


PRIORS: Mapping[str, Prior] = {
    "matmul": Prior(0.82, 0.1),
    "k_half": Prior(150, 1.0),
    "n_half": Prior(60, 1.0),
    "m_half": Prior(60, 1.0),
    "attention": Prior(0.5, 0.3),
    "narrow": Prior(0.85, 0.1),
    "unaligned": Prior(0.4, 0.5),
    "memory": Prior(0.85, 0.1),
    "launch_s": Prior(45e-6, 0.3),
    "gap_s": Prior(10e-6, 0.5),
    "launch_power": Prior(4.0, 0.3),
    "message_s": Prior(60e-6, 1.0),
    "optimizer": Prior(1.0, 0.4),
    "transfer": Prior(1.5, 0.7),
    "overlap": Prior(0.5, 0.6),
    "step_s": Prior(5e-3, 1.5),
    "step_growth_s": Prior(0.02, 0.3),
    "growth": Prior(0.015, 0.7),
    "collective": Prior(1.0, 0.3),
    "exchange": Prior(1.0, 0.4),
}
"""What programs of PyTorch on GPUs are expected to reach; widths say how much devices and programs differ."""


@dataclass(frozen=True)
class Measured:
    """Steps that were measured on one cluster.

    Attributes:
        names: by which rows are told, one for each layout.
        workload: of one model, or of one for each layout.
        layouts: how they were split.
        cluster: where they ran.
        seconds: of a step.
    """

    names: tuple[str, ...]
    workload: Workload
    layouts: Layouts
    cluster: Cluster
    seconds: Numbers


@dataclass(frozen=True)
class Fitted:
    """Coefficients found.

    Attributes:
        rates: all of them; those without a prior as they were.
        widths: by coefficient, the share of its prior's width that rows would leave if it was not held to it.
        residuals: logarithm of measured over estimated seconds, for each row in order.
        names: of the rows.
    """

    rates: Rates
    widths: Mapping[str, float]
    residuals: Numbers
    names: tuple[str, ...]

    @property
    def unidentified(self) -> tuple[str, ...]:
        """Names of coefficients about which the rows say little: they stayed near their prior."""
        return tuple(name for name, width in self.widths.items() if width > IDENTIFIED)


def with_rates(cluster: Cluster, rates: Rates) -> Cluster:
    """Return the cluster with these coefficients on all of its devices."""
    groups = tuple(replace(group, device=replace(group.device, rates=rates)) for group in cluster.groups)
    return replace(cluster, groups=groups)


def fit(rows: Sequence[Measured], start: Rates, *, priors: Mapping[str, Prior] = PRIORS, hold: float = 2.0) -> Fitted:
    """Return the coefficients under which rows and priors are likeliest.

    Args:
        rows: what was measured.
        start: coefficients without a prior keep its values.
        priors: of the coefficients to find.
        hold: weight of a prior against a row's residual.
    """
    names = tuple(priors)
    centre = np.log([priors[name].centre for name in names])
    width = np.array([priors[name].width for name in names])

    prepared = [_Rows(each) for each in rows]

    def rates_at(point: Numbers) -> Rates:
        return replace(start, **dict(zip(names, np.exp(point).tolist(), strict=True)))

    def misses(point: Numbers) -> Numbers:
        rates = rates_at(point)
        return np.concatenate([each.residuals(rates) for each in prepared])

    def objective(point: Numbers) -> Numbers:
        return np.concatenate([misses(point) / NOISE, hold * (point - centre) / width])

    from scipy.optimize import least_squares  # which takes a while to load

    found = least_squares(objective, centre, loss="soft_l1", max_nfev=100)
    shown = found.jac[: -len(names)]  # by rows alone
    left = np.sqrt(np.diag(np.linalg.inv(shown.T @ shown + np.diag(width**-2)))) / width
    left_over = misses(found.x)
    points = np.concatenate([coordinates(each.workload, each.layouts, each.cluster) for each in rows])
    table = tuple(tuple(row) for row in np.column_stack([points, left_over]).round(DIGITS).tolist())
    return Fitted(
        rates=replace(rates_at(found.x), residuals=table),
        widths=dict(zip(names, left.tolist(), strict=True)),
        residuals=left_over,
        names=tuple(name for each in rows for name in each.names),
    )


class _Rows:
    """Rows of one cluster, whose demands are computed once."""

    def __init__(self, rows: Measured) -> None:
        self._rows = rows
        self._demand = step_demand(rows.workload, rows.layouts, rows.cluster)

    def residuals(self, rates: Rates) -> Numbers:
        """Return the logarithm of measured over estimated seconds."""
        rows = self._rows
        parts = step_parts(self._demand, rows.workload, rows.layouts, with_rates(rows.cluster, rates))
        return np.asarray(np.log(rows.seconds) - np.log(parts.step_s))
