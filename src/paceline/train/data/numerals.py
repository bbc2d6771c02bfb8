"""Numbers in text, many at a time: digit by digit over all of them, where Python would go number by number."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]

_DIGITS: Final = 18
"""Of a number, that surely fit 63 bits."""

_EXACT: Final = 2**53
_POWERS: Final = 10.0 ** np.arange(23)  # all of them exact


class NotANumber(ValueError):
    """Some text is no number. `which`: the first that is not."""

    def __init__(self, which: int) -> None:
        super().__init__(which)
        self.which = which


class _Read(NamedTuple):
    """What digits amount to. scale: of them behind the point, -1 without one; odd: what is not made of them alone."""

    mantissa: NDArray[np.int64]
    scale: NDArray[np.int64]
    odd: NDArray[np.bool_]


def read_floats(text: bytes, starts: Places, ends: Places) -> NDArray[np.float64]:
    """Return the numbers between some places of `text`, rounded as Python rounds: [n].

    Few digits divided by an exact power of ten are rounded once (Clinger, 1990); all else Python reads.

    Raises:
        NotANumber: one is none; infinity and NaN count as none.
    """
    read = _read(text, starts, ends)
    values = read.mantissa / _POWERS[np.maximum(read.scale, 0)]
    for which in np.flatnonzero(read.odd | (abs(read.mantissa) > _EXACT)):
        values[which] = _converted(float, text, starts, ends, int(which))
    if not np.isfinite(values).all():
        raise NotANumber(int(np.flatnonzero(~np.isfinite(values))[0]))
    return values


def read_integers(text: bytes, starts: Places, ends: Places) -> NDArray[np.int64]:
    """Return the whole numbers between some places of `text`: [n].

    Raises:
        NotANumber: one is none, or takes more than 64 bits.
    """
    read = _read(text, starts, ends)
    values = read.mantissa
    for which in np.flatnonzero(read.odd | (read.scale >= 0)):
        value = _converted(int, text, starts, ends, int(which))
        if not -(2**63) <= value < 2**63:
            raise NotANumber(int(which))
        values[which] = value
    return values


def _read(text: bytes, starts: Places, ends: Places) -> _Read:
    letters = np.frombuffer(text + b"\0", dtype=np.uint8)
    signs = letters[starts]
    negative = signs == ord("-")
    places = starts + (negative | (signs == ord("+")))
    lengths = ends - places
    odd = (lengths <= 0) | (lengths > _DIGITS)
    mantissa = np.zeros(len(starts), dtype=np.int64)
    scale = np.full(len(starts), -1, dtype=np.int64)
    for k in range(min(int(lengths.max(initial=0)), _DIGITS)):
        inside = k < lengths
        letter = letters[np.where(inside, places + k, 0)]
        digit = inside & (letter >= ord("0")) & (letter <= ord("9"))
        point = inside & (letter == ord(".")) & (scale < 0)
        odd |= inside & ~digit & ~point
        mantissa = np.where(digit, mantissa * 10 + (letter.astype(np.int64) - ord("0")), mantissa)
        scale += point | (digit & (scale >= 0))
    return _Read(np.where(negative, -mantissa, mantissa), scale, odd | (lengths == (scale >= 0)))


def _converted(kind: Any, text: bytes, starts: Places, ends: Places, which: int) -> Any:
    word = text[starts[which] : ends[which]]
    if b"_" in word:  # which Python takes within numbers
        raise NotANumber(which)
    try:
        return kind(word)
    except ValueError:
        raise NotANumber(which) from None
