"""The pieces of a synchronous step: kept until all have come, then their weighted mean, in whatever order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from paceline.exchange.shard.norms import squares
from paceline.exchange.table.route import unique_rows
from paceline.exchange.updates import Part


@dataclass(frozen=True, slots=True)
class _Piece:
    """What came for a step before it was its turn."""

    tasks: tuple[int, ...]
    weight: float
    parts: tuple[Part, ...]


class _Rows(NamedTuple):
    """Rows of one piece, or of several one after the other: then a key may be there more than once."""

    keys: Tensor
    values: Tensor
    several: bool = False


class Step:
    """Sums pieces in the order of their tasks, each as soon as those before it are there.

    A piece without a part for a table counts as zeros there. Sums are of float32 at least, and every product and sum
    rounds by itself, so that machines of other kinds get the same bits.

    Args:
        first: the lowest task of the step.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._taken: set[int] = set()
        self._waiting: dict[int, _Piece] = {}
        self._weight = 0.0
        self._squares: float | None = None
        self._dense: dict[int, Tensor] = {}
        self._rows: dict[int, list[_Rows]] = {}

    def add(self, tasks: tuple[int, ...], weight: float, parts: Iterable[Part]) -> None:
        """Take a piece. What is given may change afterwards."""
        if tasks[0] != self._next:
            parts = [Part(part.table, _copy(part.keys), part.values.clone()) for part in parts]
        self._waiting[tasks[0]] = _Piece(tasks, weight, tuple(parts))
        while self._next in self._waiting:
            self._take(self._waiting.pop(self._next))

    def means(self) -> Iterator[Part]:
        """Return the mean gradient of each table that has one, in the order of tables; once all pieces have come."""
        assert not self._waiting
        if self._weight == 0:
            return
        for table in sorted({*self._dense, *self._rows}):
            if table in self._dense:
                yield Part(table, None, self._dense[table] / self._weight)
                continue
            rows = self._rows[table]
            keys, sums, several = rows[0]
            if several or len(rows) > 1:
                keys, sums = unique_rows(
                    torch.cat([part.keys for part in rows]), torch.cat([part.values for part in rows])
                )
            yield Part(table, keys, sums / self._weight)

    @property
    def squares(self) -> float:
        """The sum of squares of all elements of the mean gradients; once all pieces have come."""
        if self._squares is None:
            self._squares = squares(self.means())
        return self._squares

    def _take(self, piece: _Piece) -> None:
        self._weight += piece.weight
        for table, keys, values in piece.parts:
            # Multiplied and added apart: a fused operation rounds otherwise, and not on every machine.
            weighed = values.to(torch.promote_types(values.dtype, torch.float32)) * piece.weight
            if keys is not None:
                self._rows.setdefault(table, []).append(_Rows(keys.clone(), weighed))
            elif table in self._dense:
                self._dense[table] += weighed
            else:
                self._dense[table] = weighed
        self._taken.update(piece.tasks)
        while self._next in self._taken:
            self._taken.remove(self._next)
            self._next += 1

    def state(self, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return plain values for JSON, and put tensors into `tensors` under names that begin with `prefix`."""
        for table, values in self._dense.items():
            tensors[f"{prefix}.sum.{table}"] = values.clone()
        for table, rows in self._rows.items():
            tensors[f"{prefix}.keys.{table}"] = torch.cat([part.keys for part in rows])
            tensors[f"{prefix}.rows.{table}"] = torch.cat([part.values for part in rows])
        waiting = []
        for task, piece in sorted(self._waiting.items()):
            for table, keys, values in piece.parts:
                tensors[f"{prefix}.{task}.values.{table}"] = values.clone()
                if keys is not None:
                    tensors[f"{prefix}.{task}.keys.{table}"] = keys.clone()
            tables = [part.table for part in piece.parts]
            waiting.append({"tasks": list(piece.tasks), "weight": piece.weight, "tables": tables})
        return {
            "next": self._next,
            "taken": sorted(self._taken),
            "weight": self._weight,
            "dense": sorted(self._dense),
            "rows": sorted(self._rows),
            "waiting": waiting,
        }

    @classmethod
    def of(cls, prefix: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Self:
        """Read what `state` wrote."""
        made = cls(state["next"])
        made._taken = set(state["taken"])
        made._weight = state["weight"]
        made._dense = {table: tensors[f"{prefix}.sum.{table}"].clone() for table in state["dense"]}
        for table in state["rows"]:
            keys, sums = tensors[f"{prefix}.keys.{table}"], tensors[f"{prefix}.rows.{table}"]
            rows = _Rows(keys.clone(), sums.clone(), several=True)
            made._rows[table] = [rows]
        for piece in state["waiting"]:
            tasks = tuple(piece["tasks"])
            parts = _parts(f"{prefix}.{tasks[0]}", tensors, piece["tables"])
            made._waiting[tasks[0]] = _Piece(tasks, piece["weight"], parts)
        return made


def _parts(prefix: str, tensors: Mapping[str, Tensor], tables: Sequence[int]) -> tuple[Part, ...]:
    return tuple(
        Part(table, _copy(tensors.get(f"{prefix}.keys.{table}")), tensors[f"{prefix}.values.{table}"].clone())
        for table in tables
    )


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
