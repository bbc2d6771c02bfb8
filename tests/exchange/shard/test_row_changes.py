"""Shards note which rows tasks have changed: never too few, and those of who asks left out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.job import Consistency, Job, Mode, Rule, SparseTable
from paceline.exchange.shard import changes
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Part, Update

ASP = Consistency(Mode.ASP, None)


def job(consistency: Consistency = ASP) -> Job:
    return Job((SparseTable("t", 1, "float64", Rule("sgd", {"lr": 1.0}), consistency),), shards=1, notes_changes=True)


def update(worker: int, sequence: int, tasks: tuple[int, ...], keys: list[int]) -> Update:
    values = torch.ones(len(keys), 1, dtype=torch.float64)
    return Update(worker, sequence, tasks, -1, 1.0, (Part(0, torch.tensor(keys), values),))


def keys(found: Tensor) -> list[int]:
    return sorted(found.tolist())


def test_rows_that_others_have_changed_since() -> None:
    shard = Shard(job(), 0)
    shard.apply(update(1, 1, (0,), [5, 7]))
    shard.apply(update(-1, 1, (), [9]))  # a difference that is carried here
    shard.apply(update(2, 1, (1,), [7, 8]))
    assert keys(shard.changed(0, 0, -1)) == [5, 7, 8]
    assert keys(shard.changed(0, 1, -1)) == [7, 8]
    assert keys(shard.changed(0, 3, -1)) == []
    assert keys(shard.changed(0, 0, 2)) == [5, 7]
    assert keys(shard.changed(0, -1, 2)) == [5, 7, 8, 9]  # all that there are
    with pytest.raises(ExchangeError, match="notes no changes"):
        shard.changed(1, 0, 2)
    gone_on = Shard.of(shard.job, 0, shard.state())
    assert keys(gone_on.changed(0, 2, -1)) == [5, 7, 8, 9]  # it cannot know
    assert keys(gone_on.changed(0, 3, -1)) == []


def test_rows_of_a_step_change_when_it_is_applied() -> None:
    shard = Shard(Job(job(Consistency()).tables, shards=1, pieces=2, notes_changes=True), 0)
    shard.apply(update(1, 1, (0,), [5]))
    assert keys(shard.changed(0, 0, -1)) == []
    shard.apply(update(2, 1, (1,), [6]))
    assert keys(shard.changed(0, 1, -1)) == [5, 6]


def test_what_is_long_ago_is_forgotten_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_LEAST", 4)
    noted = changes.Changes()
    for position in range(1, 6):
        noted.note(position, 1, torch.tensor([position, 10 + position]), 1)
    found = noted.since(3, -1)
    assert found is not None and keys(found) == [4, 5, 14, 15]
    assert noted.since(2, -1) is None
