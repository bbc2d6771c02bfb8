"""Downpour (Dean et al., 2012) on a shard: four workers that read and push every few batches reach what one does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.exchange.job import Consistency, DenseTable, Job, Rule, SparseTable
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Part, Update
from tests.exchange.hogwild.logistic import A9A, gradient, quality, read_a9a

KEYS = torch.arange(1, 124)


@pytest.mark.skipif(not A9A.exists(), reason="there is no ../shared/data/a9a")
def test_workers_with_old_parameters_converge() -> None:
    workers, consistency, rule = 4, Consistency.parse("downpour(5, 3)"), Rule("adagrad", {"lr": 0.1})
    tables = (
        DenseTable("bias", (1,), rule=rule, consistency=consistency),
        SparseTable("weights", 1, rule=rule, consistency=consistency),
    )
    shard = Shard(Job(tables, shards=1, pieces=workers), 0)
    samples = read_a9a(A9A)
    batches = np.array_split(np.random.default_rng(0).permutation(len(samples.labels)), 1600)
    copies = [(torch.empty(1), torch.empty(len(KEYS), 1), -1)] * workers
    gathered: list[list[tuple[int, torch.Tensor, torch.Tensor]]] = [[] for _ in range(workers)]
    stalest = 0
    for task, chosen in enumerate(batches):
        worker, turn = task % workers, task // workers
        if turn % consistency.fetch_every == 0:
            assert shard.ready(1, turn)
            copies[worker] = shard.read(0).clone(), torch.empty(len(KEYS), 1), shard.position
            shard.read_rows(1, KEYS, copies[worker][1])
        batch = samples.of(chosen)
        bias, rows, read = copies[worker]
        of_bias, some = gradient(batch, bias, rows[batch.keys - 1])
        of_rows = torch.zeros(len(KEYS), 1)
        of_rows[batch.keys - 1] = some
        gathered[worker].append((task, of_bias, of_rows))
        if len(gathered[worker]) == consistency.push_every:
            tasks, biases, all_rows = zip(*gathered[worker], strict=True)
            mean = sum(all_rows) / len(tasks)
            touched = mean[:, 0] != 0
            parts = (Part(0, None, sum(biases) / len(tasks)), Part(1, KEYS[touched], mean[touched]))
            applied = shard.apply(Update(worker, turn + 1, tasks, read, 1.0, parts))
            stalest = max(stalest, applied.staleness)
            gathered[worker] = []
    weights = torch.empty(len(KEYS), 1)
    shard.read_rows(1, KEYS, weights)
    loss, auc = quality(read_a9a(Path(f"{A9A}.t")), shard.read(0), weights, KEYS)
    print(f"log loss {loss:.4f}, AUC {auc:.4f}, staleness up to {stalest}")
    assert stalest >= 3
    assert loss <= 0.326 and round(auc, 3) >= 0.902
