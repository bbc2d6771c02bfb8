"""The laws of scaling: how much faster ranks make a fixed problem (Amdahl), how much larger a one (Gustafson).

G. M. Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities", AFIPS 1967;
J. L. Gustafson, "Reevaluating Amdahl's law", CACM 31(5), 1988. A fraction that is fitted to measurements may come out
below 0 (ranks help each other, with caches for example) or above 1 (they hinder each other); what is predicted from it
takes it for 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from paceline.simulator.workload import Numbers

_DRAWS = 1000
_LIKELY = (0.05, 0.95)


def amdahl_speedup(fraction: float, ranks: ArrayLike) -> Numbers:
    """Return by how much a fixed problem with a serial fraction is faster on ranks: 1 / (s + (1 - s) / n)."""
    serial = _share(fraction)
    return np.asarray(1 / (serial + (1 - serial) / np.asarray(ranks, dtype=np.float64)))


def amdahl_limit(fraction: float) -> float:
    """Return what no number of ranks exceeds."""
    serial = _share(fraction)
    return 1 / serial if serial else math.inf


def gustafson_speedup(fraction: float, ranks: ArrayLike) -> Numbers:
    """Return how much more is done in the same time where the problem grows with the ranks: n - s (n - 1).

    The fraction is that of the time on ranks, not of the time on one.
    """
    many = np.asarray(ranks, dtype=np.float64)
    return np.asarray(many - _share(fraction) * (many - 1))


def fit_amdahl(ranks: ArrayLike, seconds: ArrayLike) -> Numbers:
    """Return the serial fraction of a fixed problem that took some seconds on some ranks.

    Seconds are a + b / n; the fraction is a / (a + b). Least squares of relative errors, so that no number of ranks
    counts more than another.

    Args:
        ranks: [N].
        seconds: [..., N], several measurements at once.

    Raises:
        ValueError: fewer than two numbers of ranks.
    """
    many, taken = _checked(ranks, seconds)
    rows = np.stack([1 / taken, 1 / (many * taken)], axis=-1)  # [..., N, 2]
    parts = np.linalg.pinv(rows).sum(axis=-1)  # [..., 2]
    return np.asarray(parts[..., 0] / parts.sum(axis=-1))


def fit_gustafson(ranks: ArrayLike, seconds: ArrayLike) -> Numbers:
    """Return the serial fraction of a problem that grows with the ranks and took some seconds on them.

    What is done in the same time, n T(1) / T(n), is n - s (n - 1). Least squares of relative errors.

    Args:
        ranks: [N].
        seconds: [..., N], several measurements at once.

    Raises:
        ValueError: fewer than two numbers of ranks, or none of them is 1.
    """
    many, taken = _checked(ranks, seconds)
    if not np.any(many == 1):
        raise ValueError("what ranks add is relative to one rank, which was not measured")
    one_s = taken[..., many == 1].mean(axis=-1, keepdims=True)
    done = many * one_s / taken
    slope, missing = (many - 1) / done, many / done - 1
    return np.asarray((slope * missing).sum(axis=-1) / (slope * slope).sum(axis=-1))


@dataclass(frozen=True)
class Fitted:
    """A serial fraction, and between which values nine of ten repetitions of the measurement would put it."""

    fraction: float
    low: float
    high: float


def fitted(
    fit: Callable[[ArrayLike, ArrayLike], Numbers], ranks: Sequence[int], rounds: ArrayLike, *, seed: int = 0
) -> Fitted:
    """Fit medians of rounds, and again of rounds drawn with replacement (the bootstrap).

    Args:
        fit: one of those above.
        ranks: the numbers of ranks measured.
        rounds: seconds, by round and number of ranks.
        seed: of the draws.
    """
    taken = np.asarray(rounds, dtype=np.float64)
    random = np.random.default_rng(seed)
    picks = random.integers(len(taken), size=(_DRAWS, len(taken)))
    low, high = np.quantile(fit(ranks, np.median(taken[picks], axis=1)), _LIKELY)
    return Fitted(float(fit(ranks, np.median(taken, axis=0))), float(low), float(high))


def _share(fraction: float) -> float:
    return min(max(fraction, 0.0), 1.0)


def _checked(ranks: ArrayLike, seconds: ArrayLike) -> tuple[Numbers, Numbers]:
    many, taken = np.asarray(ranks, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if len(np.unique(many)) < 2:
        raise ValueError("a law needs two numbers of ranks, or more")
    return many, taken
