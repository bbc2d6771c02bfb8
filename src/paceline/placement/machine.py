"""What a machine can do: rates of operators and of the links between ranks, as they were measured or as round figures.

Figures have two significant digits. They rank placements, so a plan should not depend on what else ran while they were
taken; and they are taken once, see `runtime.figures`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.placement.redistribute import Collective

Json = Any
_CURVES = ("products", "half_products", "touching")


@dataclass(frozen=True)
class Curve:
    """A rate that depends on the size of the work: `points` are (size, units per second), sizes ascending.

    Between points it is a straight line over the logarithm of the size; beyond them it stays.
    """

    points: tuple[tuple[float, float], ...]

    def rate(self, size: float) -> float:
        """Units per second for a piece of work of `size` units."""
        at = bisect_right(self.points, size, key=lambda point: point[0])
        if at in (0, len(self.points)):
            return self.points[max(at - 1, 0)][1]
        (low, slow), (high, fast) = self.points[at - 1], self.points[at]
        share = math.log(size / low) / math.log(high / low)
        return slow + share * (fast - slow)

    def seconds(self, size: float) -> float:
        """Seconds for a piece of work of `size` units."""
        return size / self.rate(size) if size else 0.0


def constant(rate: float) -> Curve:
    """A rate that does not depend on the size."""
    return Curve(((1.0, rate),))


@dataclass(frozen=True)
class Link:
    """Seconds of a collective of `nbytes`, those of the whole tensor: `latency` + `nbytes` * `per_byte`."""

    latency: float
    per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Seconds of one collective."""
        return self.latency + nbytes * self.per_byte


Links = Mapping[Collective, Link]


@dataclass(frozen=True)
class Machine:
    """Rates of one rank.

    Attributes:
        per_call: seconds that a call takes whatever it computes.
        products: floating-point operations per second of matrix products and convolutions, by their number in one.
        half_products: the same in types of two bytes.
        touching: bytes per second of everything else, by their number.
        links: what collectives between so many ranks take, where it was measured.
        axes: what they take along an axis of a mesh, where that is known: axes of the same size may lie inside hosts
            and between them.
    """

    per_call: float = 3e-6
    products: Curve = field(default_factory=lambda: constant(45e9))
    half_products: Curve = field(default_factory=lambda: constant(45e9))
    touching: Curve = field(default_factory=lambda: constant(20e9))
    links: Mapping[int, Links] = field(default_factory=dict)
    axes: Mapping[str, Links] = field(default_factory=dict)

    def along(self, axis: str, parts: int) -> Machine:
        """Return the machine as an axis of so many ranks sees it."""
        known = self.axes.get(axis)
        return self if known is None else replace(self, links={**self.links, parts: known})

    def to_json(self) -> Json:
        """Return JSON values of all but links."""
        return {
            "per_call": self.per_call,
            **{name: [list(point) for point in getattr(self, name).points] for name in _CURVES},
        }

    @classmethod
    def from_json(cls, data: Json, links: Mapping[int, Links] | None = None) -> Machine:
        """Read what `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        return cls(
            per_call=_positive(data["per_call"]),
            links=links or {},
            products=_curve(data["products"]),
            half_products=_curve(data["half_products"]),
            touching=_curve(data["touching"]),
        )


def links_to_json(links: Links) -> Json:
    """Return JSON values."""
    return {kind.value: [link.latency, link.per_byte] for kind, link in links.items()}


def links_from_json(data: Json) -> Links:
    """Read what `links_to_json` wrote.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    return {kind: Link(_positive(data[kind.value][0]), _positive(data[kind.value][1])) for kind in Collective}


def two_digits(value: float) -> float:
    """Round to two significant digits."""
    return float(f"{value:.1e}")


def _curve(data: Json) -> Curve:
    points = tuple((_positive(size), _positive(rate)) for size, rate in data)
    if not points or list(points) != sorted(points):
        raise ValueError(f"{data} are no rates by size")
    return Curve(points)


def _positive(value: Json) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is no positive number")
    return float(value)
