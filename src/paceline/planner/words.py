"""How bytes, shapes, placements and operators read on a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from paceline.placement.placements import Placement, Shape

_UNITS = ("B", "kB", "MB", "GB", "TB")
THE_MODEL = "(model)"


def size(count: float) -> str:
    """Return bytes with three digits, `1.23 MB`."""
    unit = 0
    while round(count, 3 if unit else 0) >= 999.5 and unit + 1 < len(_UNITS):
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


def sizes(each: Sequence[int]) -> str:
    """Return the bytes of things that are alike, `6 x 393 kB`."""
    return size(each[0]) if len(each) == 1 else f"{len(each)} x {size(each[0])}"


def time(seconds: float) -> str:
    """Return a time with three digits, `1.23 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def times(factor: float) -> str:
    """Return a ratio, `1.08 times`."""
    return f"{factor:.3g} times"


def rate(count: float, seconds: float) -> str:
    """Return how many a second, with three digits or whole."""
    found = count / seconds if seconds else math.inf
    return f"{found:.0f}" if found >= 1000 else f"{found:.3g}"


def ranks(numbers: Sequence[int]) -> str:
    """Return ranks, `0, 1`."""
    return ", ".join(map(str, numbers))


def shape(dims: Shape) -> str:
    """Return a shape, `768 x 256`; a tensor without dimensions is a `number`."""
    return " x ".join(map(str, dims)) or "number"


def placed(placements: Sequence[Placement], axes: int) -> list[str]:
    """Return a cell for each axis; `-` where it is not known."""
    return [str(placement) for placement in placements] or ["-"] * axes


def module(name: str) -> str:
    """Return the name of a module; the outermost one has none."""
    return name or THE_MODEL


def operator(name: str) -> str:
    """Return the name of an operator as users know it: `attention`, `layer_norm`."""
    for known in ("attention", "batch_norm"):
        if known in name:
            return known
    name = name.strip("_").removeprefix("native_").removeprefix("fused_")
    return name.removesuffix("_forward").removesuffix("_with_indices")


def broken(name: str, width: int) -> str:
    """Return a name in lines of at most `width`, broken behind dots where that is possible."""
    lines, line = [], ""
    for part in re.findall(r"(?:\{[^}]*\}|[^.{])+\.?|.", name):  # `{0..11}` stays whole
        if line and len(line) + len(part) > width:
            lines.append(line)
            line = "  "
        line += part
    return "\n".join([*lines, line])


def both_passes(counts: Iterable[tuple[bool, str, int]]) -> str:
    """Return what moves in which pass, `forward 2 all_reduce; backward 2 all_reduce`."""
    listed: dict[str, list[str]] = {}
    for backward, kind, count in counts:
        listed.setdefault(pass_(backward), []).append(f"{count} {kind}")
    return "; ".join(f"{name} {', '.join(found)}" for name, found in listed.items())


def pass_(backward: bool) -> str:
    """Return the name of a pass."""
    return "backward" if backward else "forward"
