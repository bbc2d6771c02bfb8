"""What is where in the memory that Hogwild's workers share: a function of the job and of how many rows there may be."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from paceline.errors import ExchangeError
from paceline.exchange.job import DenseTable, Job, SparseTable
from paceline.exchange.table.rules import rule_of

WORKERS: Final = 1024
"""Workers that one memory may see in its life."""
_ALIGNMENT: Final = 4096
_DTYPES: Final = ("float32", "float64")


@dataclass(frozen=True)
class Region:
    """An array in the memory.

    Attributes:
        name: `header`, `updates`, or of what table it is what.
        offset: where it begins, in bytes; a multiple of a page.
        dtype: of its elements.
        shape: its shape.
        grows: whether its first dimension is rows, which get memory as they are made.
    """

    name: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    grows: bool = False

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def regions(job: Job, rows: int) -> tuple[Region, ...]:
    """Return the arrays of a job's memory, one after the other.

    Args:
        job: what is kept.
        rows: how many each sparse table may have.

    Raises:
        ExchangeError: a table is of a type that cannot be updated in place.
    """
    found: list[Region] = []
    at = 0

    def put(name: str, dtype: Any, shape: tuple[int, ...], grows: bool = False) -> None:
        nonlocal at
        found.append(Region(name, at, np.dtype(dtype), shape, grows))
        at += -(-found[-1].size_bytes // _ALIGNMENT) * _ALIGNMENT

    put("header", np.int64, (_ALIGNMENT // 8,))
    put("updates", np.int64, (WORKERS, 8))  # a cache line each, so that workers do not take it from one another
    for index, table in enumerate(job.tables):
        if table.dtype not in _DTYPES:
            raise ExchangeError(f"table {table.name} is {table.dtype}; in shared memory it is {' or '.join(_DTYPES)}.")
        rule = rule_of(table.rule)
        if isinstance(table, DenseTable):
            for name in ("values", *rule.elements):
                put(f"{index}.{name}", table.dtype, (table.count,))
            for name in rule.rows:
                put(f"{index}.{name}", table.dtype, (1,))
            continue
        put(f"{index}.index", np.int32, (index_size(rows),))
        put(f"{index}.keys", np.int64, (rows,), True)
        for name, width in columns(table).items():
            put(f"{index}.{name}", table.dtype, (rows, width), True)
    return tuple(found)


def columns(table: SparseTable) -> dict[str, int]:
    """Return what is kept for a row, and how many numbers each is."""
    rule = rule_of(table.rule)
    return dict.fromkeys(("values", *rule.elements), table.width) | dict.fromkeys(rule.rows, 1)


def index_size(rows: int) -> int:
    """Return the slots of an index of so many rows: a power of two, half empty at least."""
    return 1 << (2 * rows - 1).bit_length()


def digest(job: Job) -> int:
    """Return what tells jobs apart."""
    text = json.dumps(job.to_dict(), sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
