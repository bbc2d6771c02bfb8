"""Quantities as people write them: `25 GB/s`, `200 Gb/s`, `80 GiB`, `5 us`, `312 TFLOP/s`, or plain SI numbers."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from enum import Enum
from typing import Any

from paceline.errors import ClusterError

# Decimals, so that `5 us` is 5e-6 to the last bit.
_PREFIXES = {"": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12)}
_PREFIXES["P"] = Decimal(10**15)
_BINARY = {"Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40)}
_PARTS = {"": Decimal(1), "m": Decimal("1e-3"), "u": Decimal("1e-6"), "n": Decimal("1e-9")}
_QUANTITY = re.compile(r"([0-9][0-9_]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/]*)")


class Unit(Enum):
    """What a number counts; the value is what a message suggests."""

    BYTES_PER_SECOND = "25 GB/s or 200 Gb/s"
    BYTES = "80 GB or 80 GiB"
    SECONDS = "5 us"
    FLOPS = "312 TFLOP/s"


_BITS = {f"{prefix}b/s": multiple / 8 for prefix, multiple in _PREFIXES.items()}
_BINARY_BYTES = {f"{prefix}B": multiple for prefix, multiple in _BINARY.items()}
_MULTIPLES = {
    Unit.BYTES_PER_SECOND: {f"{prefix}B/s": multiple for prefix, multiple in _PREFIXES.items()},
    Unit.BYTES: {f"{prefix}B": multiple for prefix, multiple in _PREFIXES.items()},
    Unit.SECONDS: {f"{prefix}s": multiple for prefix, multiple in _PARTS.items()},
    Unit.FLOPS: {f"{prefix}FLOP/s": multiple for prefix, multiple in _PREFIXES.items()},
}
_ALSO_READ = {Unit.BYTES_PER_SECOND: _BITS, Unit.BYTES: _BINARY_BYTES, Unit.SECONDS: {}, Unit.FLOPS: {}}


def read(value: Any, unit: Unit) -> float:
    """Return a quantity in SI units.

    Raises:
        ClusterError: it is no quantity of this unit.
    """
    if isinstance(value, str):
        found = _QUANTITY.fullmatch(value.strip())
        multiples = {"": Decimal(1), **_MULTIPLES[unit], **_ALSO_READ[unit]}
        if not found or found[2] not in multiples:
            raise ClusterError(f"cannot read {value!r}; write a quantity such as {unit.value}, or a plain SI number.")
        return float(Decimal(found[1]) * multiples[found[2]])
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ClusterError(f"{value!r} is no quantity; write one such as {unit.value}, or a plain SI number.")
    return float(value)


def write(value: float, unit: Unit) -> str | float:
    """Return the shortest text that `read` makes the same number of, or the number itself where there is none."""
    multiples = _MULTIPLES[unit] | (_BINARY_BYTES if unit is Unit.BYTES else {})
    scaled = {name: float(Decimal(value) / multiple) for name, multiple in multiples.items()}
    texts = [f"{number:.6g} {name}" for name, number in scaled.items() if 1 <= number < 1000]
    return min((text for text in texts if read(text, unit) == value), key=len, default=value)
