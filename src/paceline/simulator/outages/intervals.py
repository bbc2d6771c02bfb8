"""How often to save: Young's and Daly's formulas, and the exact goodput of exponential interruptions.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", FGCS 22, 2006. An interval is the work between
two checkpoints, without what they take. Arguments are numbers or arrays.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import lambertw

from paceline.simulator.outages.failures import Checkpoints
from paceline.simulator.workload import Numbers, Scalar


def young_interval(stall_s: float, mean_s: float) -> float:
    """Return sqrt(2 d M), the first-order optimum for checkpoints of `d` and interruptions every `M` seconds."""
    return math.sqrt(2 * stall_s * mean_s)


def daly_interval(stall_s: float, mean_s: float) -> float:
    """Return Daly's higher-order optimum: sqrt(2 d M) (1 + x / 3 + x^2 / 9) - d with x = sqrt(d / 2 M), at most M."""
    if stall_s >= 2 * mean_s:
        return mean_s
    small = math.sqrt(stall_s / (2 * mean_s))
    return young_interval(stall_s, mean_s) * (1 + small / 3 + small**2 / 9) - stall_s


def best_interval(stall_s: float, mean_s: float) -> float:
    """Return the exact optimum of `exponential_goodput`: the root of exp((t + d) / M) (1 - t / M) = 1."""
    root = lambertw(-math.exp(-stall_s / mean_s - 1)).real
    return float(mean_s * (1 + root))


def young_goodput(interval_s: Scalar, stall_s: float, mean_s: float, recovery_s: float) -> Numbers:
    """Return the share of useful time to first order: checkpoints, half an interval lost each time, and recoveries."""
    interval = np.asarray(interval_s, dtype=np.float64)
    kept = interval / (interval + stall_s)
    return np.maximum(kept * (1 - (recovery_s + (interval + stall_s) / 2) / mean_s), 0.0)


def exponential_goodput(
    interval_s: Scalar, checkpoints: Checkpoints, mean_s: float, recovery_s: float, waiting_s: float = 0.0
) -> Numbers:
    """Return the share of useful time where interruptions are exponential and may come during recoveries too.

    It is Daly's complete model, t / (M exp(R / M) (exp((t + d) / M) - 1)), with checkpoints that count `write_s` after
    they were taken, and a mean wait for hosts in which nothing fails.
    """
    interval = np.asarray(interval_s, dtype=np.float64)
    saved = interval * math.exp(-checkpoints.write_s / mean_s) / np.expm1((interval + checkpoints.stall_s) / mean_s)
    cycle = (mean_s + waiting_s) * math.exp(recovery_s / mean_s)
    return np.asarray(saved / cycle)
