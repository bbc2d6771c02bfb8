"""Bridges between the servers of groups and the global ones, on shards in memory."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import Tensor

from paceline.exchange.job import DenseTable, Job, Rule
from paceline.exchange.terms import Terms
from paceline.train.servers.recipe.job import global_job, global_terms
from paceline.train.servers.recipe.section import ServerSection
from paceline.train.servers.supervisor.bridge import Bridge
from tests.train.servers.in_memory import Dealing, InMemory, Kept

JOB = Job((DenseTable("w", (3,), "float64", Rule("adagrad", {"lr": 0.1})),), shards=2, pieces=2)
BEGAN = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}


def moved(kept: Kept, by: list[float], worker: int = 1) -> None:
    """Move a group's parameters as its workers would."""
    InMemory(kept, worker).push([], {0: torch.tensor(by, dtype=torch.float64)}, {})


def read(kept: Kept) -> Tensor:
    return kept.values()["w"]


def test_what_groups_move_is_averaged_and_comes_back_to_them() -> None:
    above = Kept(global_job(JOB, 2), BEGAN)
    groups = [Kept(replace(JOB), BEGAN) for _ in range(2)]
    dealing = Dealing(6)
    bridges = [Bridge(InMemory(above, number), dealing, 0.5, list(BEGAN.values())) for number in range(2)]
    inside = [InMemory(kept, 9) for kept in groups]
    for kept, move in zip(groups, ([1.0, 0.0, 0.0], [0.0, 4.0, 0.0]), strict=True):
        moved(kept, move)
    bridges[0].meet(inside[0])
    assert read(above).tolist() == [1.5, 2.0, 3.0]
    moved(groups[0], [0.0, 0.0, 1.0], worker=2)  # a step after the meeting
    bridges[1].meet(inside[1])
    assert read(above).tolist() == read(groups[1]).tolist() == [1.5, 4.0, 3.0]
    bridges[0].meet(inside[0])
    assert read(above).tolist() == read(groups[0]).tolist() == [1.5, 4.0, 3.5]
    bridges[1].meet(inside[1])

    def met() -> bool:
        return len(dealing.finished) == 6

    last = threading.Thread(target=lambda: bridges[0].part([read(groups[0])], met), daemon=True)
    last.start()  # it waits for the other group
    bridges[1].part([read(groups[1])], met)
    last.join(20)
    assert not last.is_alive()
    assert read(above).tolist() == [1.5, 4.0, 3.5]
    assert sorted(dealing.finished) == list(range(6))


def test_meetings_of_a_run() -> None:
    server = ServerSection(deployment="groups", workers=4, groups=2, sync_every=10)
    terms = global_terms(server, Terms(tasks=50), JOB)  # 25 steps in each group: after 10, 20 and at the end
    assert (terms.tasks, terms.workers) == (6, 2)
