"""Repeated blocks are told once: `blocks.{0..11}.qkv.weight` stands for twelve parameters.

Knows names and what is alike; nothing of programs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_NUMBER = "#"
Box = tuple[frozenset[int], ...]
"""A set of index tuples that is a product: the indices at each position."""


@dataclass(frozen=True)
class Folded(Generic[T]):
    """Things that are alike but for the numbers in their names.

    Attributes:
        name: of all of them.
        items: in their own order; there may be several of one name.
    """

    name: str
    items: tuple[T, ...]

    @property
    def first(self) -> T:
        """One that stands for all."""
        return self.items[0]


def fold(
    items: Iterable[T], name: Callable[[T], str], alike: Callable[[T], Hashable] = lambda _: None
) -> list[Folded[T]]:
    """Return the items in groups that differ in the numbers of their names only, in the order of their first members.

    Args:
        items: things with names such as `blocks.0.qkv.weight`.
        name: of an item.
        alike: what the items of a group have in common.
    """
    ordered = list(items)
    groups: dict[Hashable, dict[tuple[int, ...], list[int]]] = {}
    for position, item in enumerate(ordered):
        template, indices = _parted(name(item))
        groups.setdefault((template, alike(item)), {}).setdefault(indices, []).append(position)
    found: list[tuple[list[int], str]] = []
    for of_group in groups.values():
        by_count: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for indices, positions in of_group.items():
            by_count[len(positions)].append(indices)
        for points in by_count.values():
            template, _ = _parted(name(ordered[of_group[points[0]][0]]))
            for box in boxes(points):
                positions = [p for point in points if _lies_in(point, box) for p in of_group[point]]
                found.append((sorted(positions), _text(template, box)))
    return [Folded(text, tuple(ordered[p] for p in positions)) for positions, text in sorted(found)]


def boxes(points: Sequence[tuple[int, ...]]) -> list[Box]:
    """Return disjoint products that together are the points; a full grid is one of them."""
    found: list[Box] = [tuple(frozenset({index}) for index in point) for point in dict.fromkeys(points)]
    for position in range(len(points[0])):
        merged: dict[tuple[Box, Box], frozenset[int]] = {}
        for box in found:
            key = box[:position], box[position + 1 :]
            merged[key] = merged.get(key, frozenset()) | box[position]
        found = [(*before, indices, *after) for (before, after), indices in merged.items()]
    return found


def _lies_in(point: tuple[int, ...], box: Box) -> bool:
    return all(index in indices for index, indices in zip(point, box, strict=True))


def _is_number(part: str) -> bool:
    return part.isdecimal() and str(int(part)) == part


def _parted(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the parts of a name with a mark for each number, and the numbers."""
    parts = name.split(".")
    template = tuple(_NUMBER if _is_number(part) else part for part in parts)
    return template, tuple(int(part) for part in parts if _is_number(part))


def _text(template: tuple[str, ...], box: Box) -> str:
    indices = iter(box)
    return ".".join(_braces(next(indices)) if part == _NUMBER else part for part in template)


def _braces(indices: frozenset[int]) -> str:
    """Write {0, 1, 2, 5} as `{0..2,5}`."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    words = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return words[0] if len(indices) == 1 else f"{{{','.join(words)}}}"
