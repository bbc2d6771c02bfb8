"""Algorithms of collectives, each as a line over the bytes of the whole tensor: seconds of waiting, seconds per byte.

Each is a function of the levels that groups cross. Sources: Thakur, Rabenseifner and Gropp, Optimization of collective
communication operations in MPICH, 2005 (rings, trees); Sanders, Speck and Traeff, Two-tree algorithms for full
bandwidth broadcast, reduction and scan, 2009 (double binary trees).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.fabric import Fabric
from paceline.cluster.reach import Crossing

Numbers = NDArray[np.float64]
Levels = Sequence["Priced"]


@dataclass(frozen=True)
class Line:
    """Seconds of an algorithm, for each group: `wait_s` + bytes of the whole tensor * `per_byte_s`."""

    wait_s: Numbers
    per_byte_s: Numbers

    def times(self, factor: float) -> Line:
        """Return the algorithm done several times."""
        return Line(self.wait_s * factor, self.per_byte_s * factor)


@dataclass(frozen=True)
class Priced:
    """A level that groups cross, with the rate and latency of the way in which messages are sent.

    Attributes:
        crossing: which part of a group is where.
        rate: bytes per second that a group sends out of a domain below.
        latency_s: of a step.
    """

    crossing: Crossing
    rate: Numbers
    latency_s: float

    def waits(self, steps: Numbers | float) -> Numbers:
        """Return seconds of so many steps, none where the level is not crossed."""
        return np.where(self.crossing.crossed, steps * self.latency_s, 0.0)

    def moves(self, share: Numbers | float) -> Numbers:
        """Return seconds for each byte of the tensor where a domain sends `share` times all of it."""
        return np.where(self.crossing.crossed, share / self.rate, 0.0)


def start(crossed: Sequence[Crossing]) -> Numbers:
    """Return seconds before the first step: those of the level that takes longest to start."""
    return _largest([np.where(it.crossed, it.level.start_s, 0.0) for it in crossed])


def ring(levels: Levels, size: Numbers) -> Line:
    """Gather, or reduce and scatter: data pass every member in turn, as fast as the slowest level lets them."""
    slowest = _largest([level.moves(1.0) for level in levels])
    return Line(_sum([level.waits(level.crossing.steps) for level in levels]), (size - 1) / size * slowest)


def by_level(levels: Levels) -> Line:
    """Gather, or reduce and scatter, by rings inside a host, then among hosts, and so on, one after the other.

    So do exchanges of ranks that share memory; NCCL has rings only.
    """
    waits = [level.waits(level.crossing.domains - 1) for level in levels]
    return Line(_sum(waits), _sum([level.moves(_all_but_one(level)) for level in levels]))


def tree(levels: Levels) -> Line:
    """Reduce to a root and broadcast from it, by two binary trees, each of half the data, so that all links work."""
    slowest = _largest([level.moves(2.0) for level in levels])
    return Line(2 * _sum([level.waits(_depth(level)) for level in levels]), slowest)


def reduced_by_level(levels: Levels) -> Line:
    """Reduce and scatter by rings inside a host, sum what one has among hosts by trees, gather inside."""
    outermost = _outermost(levels)
    waits, moves = [], []
    for index, level in enumerate(levels):
        is_last = outermost == index
        waits.append(2 * level.waits(np.where(is_last, _depth(level), level.crossing.domains - 1)))
        moves.append(level.moves(np.where(is_last, 2.0, 2 * _all_but_one(level))))
    return Line(_sum(waits), _sum(moves))


def in_switch(levels: Levels) -> Line:
    """Sum in the switches of the levels that can, by trees in the others, all of them at once, piece by piece.

    A member sends what is to be summed and one part of the sums, and gets as much: 1 + 1 / members of the tensor. In
    the trees, two hosts send each other everything once; of more, each sends everything twice. Groups to which no
    switch is of use never take it.
    """
    waits, moves = [], []
    helps = np.zeros(np.shape(levels[0].rate), dtype=np.bool_)
    for level in levels:
        share = level.crossing.level.in_switch
        if share is None:
            waits.append(2 * level.waits(_depth(level)))
            moves.append(level.moves(np.where(level.crossing.domains > 2, 2.0, 1.0)))
        else:
            waits.append(np.where(level.crossing.crossed, level.crossing.level.in_switch_s, 0.0))
            moves.append(level.moves((1 + 1 / level.crossing.domains) * level.crossing.efficiency / share))
            helps = helps | level.crossing.crossed
    return Line(np.where(helps, _sum(waits), np.inf), _largest(moves))


def chain(levels: Levels) -> Line:
    """Broadcast: pass data on from member to member, piece by piece."""
    waits = _sum([level.waits(level.crossing.steps) for level in levels])
    return Line(waits, _largest([level.moves(1.0) for level in levels]))


def branches(levels: Levels) -> Line:
    """Broadcast: down a binary tree, whose nodes send everything twice."""
    waits = _sum([level.waits(_depth(level)) for level in levels])
    return Line(waits, _largest([level.moves(2.0) for level in levels]))


def all_to_all(levels: Levels, size: Numbers) -> Line:
    """Send to each other member what is for it, through all levels at once.

    What is for a host on another rail is first handed to the neighbour that has a card there.
    """
    moves, handed_over = [], np.zeros_like(size)
    for level in reversed(levels):
        crossing = level.crossing
        # What leaves the domain below crosses this level, however far it goes.
        leaving = crossing.inside * (size - crossing.inside) / size**2
        moves.append(level.moves((leaving + handed_over) * crossing.crowding))
        rails = crossing.level.rails
        handed_over = np.where(crossing.crossed, leaving / crossing.inside * (rails - 1) / rails, 0.0)
    return Line(_sum([level.waits(_depth(level)) for level in levels]), _largest(moves))


def send(levels: Levels) -> Line:
    """Send to the next member: the pair that crosses the outermost level waits longest."""
    waits = moves = np.zeros_like(levels[0].rate)
    for level in levels:
        crossed = level.crossing.crossed
        waits = np.where(crossed, level.latency_s, waits)
        moves = np.where(crossed, level.crossing.inside / level.rate, moves)
    return Line(waits, moves)


def _all_but_one(level: Priced) -> Numbers:
    domains = level.crossing.domains
    return (domains - 1) / domains


def _depth(level: Priced) -> Numbers:
    """Return how many steps a tree over the domains has: among hosts a binary one, a chain inside a host."""
    crossing = level.crossing
    if crossing.level.fabric is Fabric.TORUS:
        return crossing.steps
    if crossing.level.fabric in (Fabric.NVLINK, Fabric.PCIE):
        return crossing.domains - 1
    return np.ceil(np.log2(np.maximum(crossing.domains, 1.0)))


def _outermost(levels: Levels) -> NDArray[np.int64]:
    """Return the index of the last level that is crossed."""
    found = np.zeros(np.shape(levels[0].rate), dtype=np.int64)
    for index, level in enumerate(levels):
        found = np.where(level.crossing.crossed, index, found)
    return found


def _largest(parts: Sequence[Numbers]) -> Numbers:
    found = parts[0]
    for part in parts[1:]:
        found = np.maximum(found, part)
    return found


def _sum(parts: Sequence[Numbers]) -> Numbers:
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    return found
