"""Boxes: which part of a tensor a piece is, and how the pieces of one layout meet those of another.

Pure arithmetic on offsets and shapes; knows nothing of tensors, files or ranks. A tensor without dimensions is a box
with an empty shape and one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor: `offset[d] <= index[d] < offset[d] + shape[d]` in every dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """Return the box of an entire tensor of `shape`."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def at_origin(self) -> bool:
        """Whether the box begins where its tensor begins."""
        return not any(self.offset)

    def intersect(self, other: Box) -> Box | None:
        """Return the box both share, or None when they share no element."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = zip(self._end(), other._end(), strict=True)
        shape = tuple(min(a, b) - start for (a, b), start in zip(ends, offset, strict=True))
        return Box(offset, shape) if all(length > 0 for length in shape) else None

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """Return the index that cuts this box out of a tensor that holds just `outer`."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))

    def _end(self) -> tuple[int, ...]:
        return tuple(start + length for start, length in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{end}" for start, end in zip(self.offset, self._end(), strict=True)) + "]"


def flaw(boxes: Iterable[Box], shape: tuple[int, ...]) -> str | None:
    """Say why `boxes` are not an exact cover of a tensor of `shape`, or None when every element is in exactly one."""
    whole = Box.whole(shape)
    filled = sorted((box for box in boxes if box.size), key=lambda box: box.offset)
    for box in filled:
        if len(box.shape) != len(shape) or box.intersect(whole) != box:
            return f"piece {box} lies outside shape {list(shape)}"
    for i, box in enumerate(filled):
        for other in filled[i + 1 :]:
            if shape and other.offset[0] >= box.offset[0] + box.shape[0]:
                break  # sorted by offset: whatever follows begins even later
            if box.intersect(other):
                return f"pieces {box} and {other} overlap"
    missing = whole.size - sum(box.size for box in filled)
    return f"{missing} of {whole.size} elements are in no piece" if missing else None
