"""Windows of a tensor that is split over ranks: what neighbours exchange where an operator reads across the cut.

Two functions in a graph, whose result on each rank depends on where it stands along the axis. `window` gives each rank
some rows of the whole tensor: its own with a halo of its neighbours' (convolution, pooling), those of another rank (a
shift, as in GSPMD), or with borders around the whole (padding). `window_sum` is its adjoint: windows that overlap are
added up where their rows came from. Calling them computes shapes only; the runtime binds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

Edge = str | float
"""What lies outside of the tensor: a number, "lowest" (of its type), or a row inside: "nearest", "reflect", "wrap"."""

NOWHERE = -1
"""The row that a filled row comes from."""


@dataclass(frozen=True)
class Rows:
    """A window for each rank along an axis: rank r has the rows [first + step * r, first + step * r + length)."""

    first: int
    step: int
    length: int

    def of(self, rank: int) -> range:
        """Return the rows of a rank."""
        start = self.first + self.step * rank
        return range(start, start + self.length)

    def is_local(self, piece: int) -> bool:
        """Whether each window lies in its rank's own piece of so many rows, at the same place on every rank."""
        return self.step == piece and self.first >= 0 and self.first + self.length <= piece


def window(x: Tensor, dim: int, first: int, step: int, length: int, edge: Edge, axis: str, parts: int) -> Tensor:
    """Return this rank's window of the tensor of which `x` is this rank's piece, split along `dim` in one block."""
    return x.new_empty(_resized(x, dim, length))


def window_sum(
    x: Tensor, dim: int, first: int, step: int, length: int, size: int, edge: Edge, axis: str, parts: int
) -> Tensor:
    """Return this rank's piece of the sum of all windows, a tensor of `size` rows of which `x` is this rank's window.

    What a window has beyond an edge counts where it came from; rows that were filled count nowhere.
    """
    return x.new_empty(_resized(x, dim, size // parts))


def sources(rows: range, size: int, edge: Edge) -> np.ndarray:
    """Return the row inside of a tensor of `size` rows that each row of a window comes from, or `NOWHERE`."""
    at = np.asarray(rows, dtype=np.int64)
    match edge:
        case "nearest":
            return np.clip(at, 0, size - 1)
        case "wrap":
            return at % size
        case "reflect":
            period = max(2 * (size - 1), 1)
            at = at % period
            return np.minimum(at, period - at) if size > 1 else np.zeros_like(at)
    return np.where((at >= 0) & (at < size), at, NOWHERE)


@dataclass(frozen=True)
class Stretch:
    """Rows of a window, one after the other, that come from neighbouring rows of one rank's piece.

    Attributes:
        owner: the rank; `NOWHERE` for rows that are filled.
        start: the row of the owner's piece that the first comes from.
        count: how many rows.
        stride: from the row of one to that of the next: 1, 0 (all come from one row) or -1.
    """

    owner: int
    start: int
    count: int
    stride: int

    @property
    def taken(self) -> range:
        """The rows of the owner's piece, in their order there."""
        if self.stride < 0:
            return range(self.start - self.count + 1, self.start + 1)
        return range(self.start, self.start + (self.count if self.stride else 1))


def stretches(rows: range, size: int, edge: Edge, parts: int) -> list[Stretch]:
    """Return what a window of a tensor of `size` rows, split over so many ranks, consists of."""
    piece, found = size // parts, list[Stretch]()
    for row in sources(rows, size, edge).tolist():
        owner, start = (NOWHERE, 0) if row == NOWHERE else divmod(row, piece)
        longer = _longer(found[-1], owner, start) if found else None
        if longer is None:
            found.append(Stretch(owner, start, 1, 1))
        else:
            found[-1] = longer
    return found


def _longer(stretch: Stretch, owner: int, start: int) -> Stretch | None:
    """Return a stretch with one more row, if that fits."""
    last = stretch.start + stretch.stride * (stretch.count - 1)
    if owner != stretch.owner:
        return None
    if owner == NOWHERE:
        return replace(stretch, count=stretch.count + 1)
    stride = start - last
    if (stride in (-1, 0, 1) and stretch.count == 1) or stride == stretch.stride:
        return replace(stretch, count=stretch.count + 1, stride=stride)
    return None


def foreign_rows(rows: Rows, size: int, edge: Edge, parts: int) -> int:
    """Return how many rows of other ranks a rank needs, at most."""
    piece = size // parts
    needed = [np.unique(sources(rows.of(rank), size, edge)) for rank in range(parts)]
    return max(int(np.sum((found != NOWHERE) & (found // piece != rank))) for rank, found in enumerate(needed))


def _resized(x: Tensor, dim: int, size: int) -> Sequence[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape
