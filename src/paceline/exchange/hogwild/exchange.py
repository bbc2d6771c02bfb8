"""Hogwild (Niu, Recht, Re and Wright, 2011): the workers of one host update one piece of memory, without locks.

There are no servers: each worker applies its own gradients, and updates of the same elements at the same moment may be
lost. What is read may be half of one update and half of another; nothing is logged, so there is no replay. Of a worker
that is killed in the midst of an update, what it had written stays; whoever does its task then writes all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.exchange.hogwild.memory import Memory
from paceline.exchange.hogwild.rows import SharedRows
from paceline.exchange.interface import Rows
from paceline.exchange.job import DenseTable, Job, SparseTable
from paceline.exchange.table.choice import chosen
from paceline.exchange.table.rates import AtRate
from paceline.exchange.table.rules import rule_of
from paceline.exchange.table.steps import Steps


class _Dense:
    """A dense table in shared memory."""

    def __init__(self, memory: Memory, index: int, table: DenseTable) -> None:
        rule = rule_of(table.rule)
        self._values = memory.array(f"{index}.values")
        self._elements = [memory.array(f"{index}.{name}") for name in rule.elements]
        self._rows = [memory.array(f"{index}.{name}") for name in rule.rows]
        self._steps = Steps(rule)
        self._apply = AtRate(rule, lambda rule: chosen().dense(rule, self._values.dtype))
        self.values = torch.from_numpy(self._values).view(table.shape)

    def update(self, gradient: Tensor, factor: float) -> None:
        """Apply a gradient, where it lies, at `factor` times the rule's learning rate."""
        given = gradient.detach().reshape(-1).to(self.values.dtype).contiguous().numpy()
        self._steps.most_is(*(torch.from_numpy(state) + 1 for state in self._rows))
        self._apply(factor)(self._values, given, self._elements, self._rows, self._steps.tables)


class HogwildExchange:
    """One worker's sight of the shared memory; see `interface.Exchange`. Reads never wait, pushes are done at once.

    Args:
        memory: made by `snapshot.begin`, or by `Memory.attach` in other processes.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        tables = memory.job.tables
        self._dense = {i: _Dense(memory, i, table) for i, table in enumerate(tables) if isinstance(table, DenseTable)}
        self._rows = {i: SharedRows(memory, i) for i, table in enumerate(tables) if isinstance(table, SparseTable)}
        self._dtypes = [getattr(torch, table.dtype) for table in tables]
        self._counters = memory.array("updates")[:, 0]
        self._number = memory.next_worker()
        self._read = self._others()
        self._staleness: Counter[int] = Counter()

    @property
    def job(self) -> Job:
        """See `Exchange`."""
        return self._memory.job

    def values(self, table: int) -> Tensor:
        """Return a dense table itself, in its shape: a parameter that lies here need not be pulled."""
        return self._dense[table].values

    def pull(self, tables: Sequence[int], out: Sequence[Tensor], clock: int) -> None:
        """See `Exchange`. Where `out` is the table itself, nothing is copied."""
        self._read = self._others()
        for table, to in zip(tables, out, strict=True):
            values = self._dense[table].values
            if to.data_ptr() != values.data_ptr():
                to.copy_(values)

    def pull_rows(self, table: int, keys: Tensor, out: Tensor, clock: int) -> None:
        """See `Exchange`."""
        if not self._dense:
            self._read = self._others()
        fits = out.is_contiguous() and out.dtype is self._dtypes[table]
        rows = out if fits else torch.empty(out.shape, dtype=self._dtypes[table])
        self._rows[table].read(keys.numpy(), rows.numpy())
        if rows is not out:
            out.copy_(rows)

    def forget(self) -> None:
        """See `Exchange`; the next read counts anew anyway."""

    def push(
        self, tasks: Sequence[int], dense: Mapping[int, Tensor], rows: Mapping[int, Rows], weight: float = 1.0
    ) -> None:
        """See `Exchange`: what is pushed is in the memory when this returns."""
        factor = self.job.rate(self.job.clock(tasks[0]))
        for table, gradient in dense.items():
            self._dense[table].update(gradient, factor)
        for table, (keys, gradients) in rows.items():
            given = gradients.detach().to(self._dtypes[table]).contiguous().numpy()
            self._rows[table].update(keys.numpy(), given, factor)
        self._staleness[1 << (self._others() - self._read).bit_length() >> 1] += 1
        self._counters[self._number] += 1

    def flush(self) -> None:
        """See `Exchange`."""

    def close(self) -> None:
        """See `Exchange`."""

    def figures(self) -> dict[str, Any]:
        """Return updates of this worker, how many of others came between its reads and its pushes, and rows.

        Staleness is counted in buckets: 0, 1, 2 to 3, 4 to 7 and so on, each under its lowest value.
        """
        return {
            "updates": int(self._counters[self._number]),
            "staleness": {str(bucket): count for bucket, count in sorted(self._staleness.items())},
            "rows": {self.job.tables[table].name: len(rows) for table, rows in self._rows.items()},
        }

    def _others(self) -> int:
        """Return how many updates all other workers have made. Each counts its own, so that no count is lost."""
        return int(self._counters.sum() - self._counters[self._number])
