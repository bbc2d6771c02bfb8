"""Values of new rows: a function of (seed, key, column), the same bits everywhere.

Normal numbers by the inverse of the distribution function (Wichura, 1988, algorithm AS 241), whose logarithm is our
own: that of the C library differs from machine to machine. `native/initial.hpp` computes the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ExchangeError, nearest
from paceline.exchange.job import Initializer
from paceline.exchange.layout import mixed

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_LN2: Final = 0.6931471805599453
_LOG_TERMS: Final = 11
_NEAR: Final = 0.425
"""How far from 1/2 the middle of the distribution reaches."""
# Of AS 241: numerators and denominators, highest power first.
_MIDDLE: Final = (
    (
        *(2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4),
        *(1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    ),
    (
        *(5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4),
        *(5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
    ),
)
_TAIL: Final = (
    (
        *(7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0),
        *(3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    ),
    (
        *(1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1),
        *(6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
    ),
)
_FAR_TAIL: Final = (
    (
        *(2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2),
        *(2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    ),
    (
        *(2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4),
        *(1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
    ),
)


class Distribution(IntEnum):
    """What values are drawn from."""

    ZEROS = 0
    UNIFORM = 1
    NORMAL = 2


@dataclass(frozen=True)
class Beginning:
    """How rows of a table begin."""

    distribution: Distribution
    scale: float
    seed: int

    @classmethod
    def of(cls, initializer: Initializer, seed: int) -> Self:
        """Return what a job says.

        Raises:
            ExchangeError: the name is unknown, or the scale is no finite number from 0.
        """
        known = [one.name.lower() for one in Distribution]
        if initializer.name not in known:
            raise ExchangeError(
                f"unknown initializer '{initializer.name}'; known: {', '.join(known)}."
                f"{nearest(initializer.name, known)}"
            )
        if not math.isfinite(initializer.scale) or initializer.scale < 0:
            raise ExchangeError(f"scale of the initializer is {initializer.scale}; it is a finite number from 0.")
        return cls(Distribution[initializer.name.upper()], initializer.scale, seed)

    @property
    def salt(self) -> int:
        """What keys are changed by, for a seed."""
        seed = np.array([self.seed & (2**64 - 1)], dtype=np.uint64)
        return int(mixed(seed + _GOLDEN)[0])

    def values(self, keys: NDArray[np.int64], width: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the values that rows begin with. keys: [n] -> [n, width]."""
        if self.distribution is Distribution.ZEROS:
            return np.zeros((len(keys), width), dtype=dtype)
        starts = mixed(keys.view(np.uint64) ^ np.uint64(self.salt))
        steps = np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
        bits = mixed(starts[:, None] + steps)
        between = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        if self.distribution is Distribution.UNIFORM:
            return (self.scale * (2 * between - 1)).astype(dtype)
        return (self.scale * normal(between)).astype(dtype)


def normal(between: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values below which a standard normal number lies with these probabilities, from within 0 and 1."""
    off = between - 0.5
    near = np.abs(off) <= _NEAR
    r = np.where(near, _NEAR * _NEAR - off * off, 0.0)
    middle = off * (_horner(_MIDDLE[0], r) / _horner(_MIDDLE[1], r))
    depth = np.sqrt(-logarithm(np.where(off < 0, between, 1 - between)))
    close, far = depth - 1.6, depth - 5.0
    tail = np.where(
        depth <= 5.0,
        _horner(_TAIL[0], close) / _horner(_TAIL[1], close),
        _horner(_FAR_TAIL[0], far) / _horner(_FAR_TAIL[1], far),
    )
    values: NDArray[np.float64] = np.where(near, middle, np.where(off < 0, -tail, tail))
    return values


def logarithm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return natural logarithms of positive normal numbers, by the series of the inverse hyperbolic tangent."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.70710678118654752440
    mantissa = np.where(small, mantissa + mantissa, mantissa)
    power = exponent.astype(np.float64) - small
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = np.zeros_like(s)
    for term in reversed(range(_LOG_TERMS)):
        series = series * square + 1 / (2 * term + 1)
    values: NDArray[np.float64] = power * _LN2 + (s + s) * series
    return values


def _horner(coefficients: tuple[float, ...], x: NDArray[np.float64]) -> NDArray[np.float64]:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
