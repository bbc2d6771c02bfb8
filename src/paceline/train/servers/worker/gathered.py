"""Gradients of several tasks that go in one push."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.exchange.interface import Deal, Rows
from paceline.train.servers.worker.computer import Computed


class Gathered:
    """Adds up gradients, each of the mean loss of its task; rows of a key in the order in which they came."""

    def __init__(self) -> None:
        self.deals: list[Deal] = []
        self._weight = 0.0
        self._dense: dict[int, Tensor] = {}
        self._rows: dict[int, list[Rows]] = {}

    def __len__(self) -> int:
        return len(self.deals)

    def add(self, deal: Deal, computed: Computed) -> None:
        """Add the gradient of a task; it is copied."""
        self.deals.append(deal)
        self._weight += computed.weight
        for table, gradient in computed.dense.items():
            if table in self._dense:
                self._dense[table].add_(gradient)
            else:
                self._dense[table] = gradient.clone()
        for table, (keys, values) in computed.rows.items():
            self._rows.setdefault(table, []).append(Rows(keys, values.clone()))

    def total(self) -> tuple[list[int], dict[int, Tensor], dict[int, Rows], float]:
        """Return the tasks, the sum of their gradients, and what those are means over, in all. To be called once."""
        tasks = [deal.number for deal in self.deals]
        rows = {table: _joined(found) for table, found in self._rows.items()}
        return tasks, self._dense, rows, self._weight


def _joined(found: list[Rows]) -> Rows:
    keys, places = torch.unique(torch.cat([rows.keys for rows in found]), return_inverse=True)
    total = torch.zeros(len(keys), found[0].values.shape[1], dtype=found[0].values.dtype)
    begun = 0
    for rows in found:  # each key once in each, so that every sum has the order of tasks
        total[places[begun : begun + len(rows.keys)]] += rows.values
        begun += len(rows.keys)
    return Rows(keys, total)
