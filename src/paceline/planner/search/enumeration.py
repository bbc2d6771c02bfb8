"""All layouts of a workload on a number of devices, at once.

Sizes of axes are divisors of the number of devices, whatever that is; grids of them are masked by what has to divide.
Layouts are made in two steps, so that those whose leanest form does not fit are never written out: which ranks split
what, and in which ways micro-batches may flow through them. Nothing is evaluated here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from paceline.plan import Axis
from paceline.planner.search.question import Question
from paceline.simulator.layouts import SCHEDULES, Flags, Integers, Layouts
from paceline.simulator.workload import Along, Recompute

_MOST_CHUNKS = 8
_ALONG = {Axis.TP: Along.TP, Axis.SP: Along.SP, Axis.HW: Along.HW}
_CHUNKS = {"1f1b": (1,), "interleaved": tuple(range(2, _MOST_CHUNKS + 1)), "zb-h1": (1,), "zb-v": (2,)}
"""Schedules with their numbers of stages on each rank. GPipe takes as long as 1F1B and holds more: it never wins."""
_WAYS = np.array([(SCHEDULES.index(name), number) for name, numbers in _CHUNKS.items() for number in numbers])
"""The first, 1F1B, also stands for no pipeline."""


def leanest_layouts(asked: Question) -> Layouts:
    """Return every way to divide devices and samples that the runtime can execute, in the form that needs least memory.

    That is the one of 1F1B, with ZeRO-3 where there is `fsdp`, blocks computed again and sequence-parallel regions.
    """
    table = _meshes(asked)
    table = _crossed(table, "micro_batch", _divisors(asked.batch))
    replicas = table["dp"] * table["fsdp"]
    table = table.where(asked.batch % (replicas * table["micro_batch"]) == 0)
    table["micro_batches"] = asked.batch // (table["dp"] * table["fsdp"] * table["micro_batch"])
    table["zero"] = np.where(table["fsdp"] > 1, 3, 0)
    table["regions"] = _may_have_regions(table, asked)
    return Layouts.of(**table.columns, recompute=Recompute.FULL.value)


def in_all_ways(layouts: Layouts, layers: int) -> Layouts:
    """Return each layout with every schedule and number of chunks, with regions or without, and with ZeRO-2 and -3.

    Nothing is recomputed.

    Args:
        layouts: as `leanest_layouts` makes them.
        layers: that stages can share.
    """
    table = _Table({field.name: getattr(layouts, field.name) for field in fields(layouts)})
    table = _crossed(table, "way", np.arange(len(_WAYS)))
    table["schedule"], table["chunks"] = _WAYS[table["way"]].T
    allowed = (table["pp"] > 1) | (table["way"] == 0)
    allowed &= table["pp"] * table["chunks"] <= max(layers, 1)
    table = _crossed(table.where(allowed), "split", np.array([0, 1]))
    table = table.where((table["split"] == 0) | table["regions"].astype(bool))
    table["regions"] = table["split"]
    table = _crossed(table, "zero", np.array([0, 2, 3]))
    table = table.where((table["fsdp"] > 1) == (table["zero"] > 0))
    columns = {name: column for name, column in table.columns.items() if name not in ("way", "split", "recompute")}
    return Layouts.of(**columns)


@dataclass(frozen=True)
class _Table:
    """Columns of equal length, by the name of a field of `Layouts`."""

    columns: dict[str, Integers]

    def __getitem__(self, name: str) -> Integers:
        return self.columns[name]

    def __setitem__(self, name: str, column: Integers | Flags) -> None:
        self.columns[name] = column.astype(np.int64)

    def where(self, which: Flags) -> _Table:
        return _Table({name: column[which] for name, column in self.columns.items()})


def _crossed(table: _Table, name: str, values: Integers) -> _Table:
    """Return each row once for every value of a further column."""
    length = len(next(iter(table.columns.values())))
    columns = {key: np.repeat(column, len(values)) for key, column in table.columns.items()}
    return _Table({**columns, name: np.tile(values.astype(np.int64), length)})


def _meshes(asked: Question) -> _Table:
    """Return all ways to write the number of devices as a product of axes that divide what they split."""
    axes = (Axis.PP, Axis.FSDP, Axis.SP, Axis.HW, Axis.TP)
    grids = np.meshgrid(*(_sizes(asked, axis) for axis in axes), indexing="ij")
    table = _Table({axis.value: grid.ravel() for axis, grid in zip(axes, grids, strict=True)})
    inner = np.prod(list(table.columns.values()), axis=0)
    table["dp"] = asked.devices // inner
    table = table.where(asked.devices % inner == 0)
    fits = asked.batch % (table["dp"] * table["fsdp"]) == 0
    return table.where(fits if Axis.DP in asked.axes else fits & (table["dp"] == 1))


def _sizes(asked: Question, axis: Axis) -> Integers:
    """Return sizes that an axis may have by itself."""
    sizes = _divisors(asked.devices)
    if axis not in asked.axes:
        return sizes[:1]
    if axis is Axis.PP:
        return np.asarray(sizes[sizes <= max(asked.layers, 1)])
    if axis is Axis.FSDP:
        return np.asarray(sizes[asked.batch % sizes == 0])
    return np.asarray(sizes[asked.workload.divisors.get(_ALONG[axis], 1) % sizes == 0])


def _may_have_regions(table: _Table, asked: Question) -> Flags:
    """Whether what lies between split layers can be split along the sequence."""
    sequence = asked.workload.divisors.get(Along.SP, 1)
    return np.asarray((table["tp"] > 1) & (sequence % (table["tp"] * table["sp"]) == 0))


def _divisors(number: int) -> Integers:
    low = np.arange(1, int(number**0.5) + 1, dtype=np.int64)
    low = low[number % low == 0]
    return np.unique(np.concatenate([low, number // low]))
