"""Nobody computes from less than the bound promises: simulated workers with delays, and some that do not wait."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.exchange.job import Job
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Update
from tests.exchange.shard import jobs


@dataclass
class _Worker:
    number: int
    sequence: int = 0
    task: int = -1
    read: int = -1


class _World:
    """Workers, one shard, and the tasks that had been applied at each position."""

    def __init__(self, job: Job, workers: int, random: Random) -> None:
        self.shard = jobs.begun(job)
        self.applied: list[set[int]] = [set()]
        self.random = random
        self.workers = [_Worker(number) for number in range(workers)]
        self.dealt = 0
        self.worst = 0

    def lacks(self, worker: _Worker, bound: int) -> bool:
        """Whether a worker read something that lacks a task of clocks below its own less the bound."""
        oldest = (worker.task // self.shard.job.pieces - bound) * self.shard.job.pieces
        return not set(range(oldest)) <= self.applied[worker.read]

    def step(self, patient: bool) -> None:
        worker = self.random.choice(self.workers)
        shard = self.shard
        if worker.task < 0:
            worker.task, self.dealt = self.dealt, self.dealt + 1
        if worker.read < 0:
            clock = shard.job.clock(worker.task)
            if not patient or all(shard.ready(table, clock) for table in shard.tables):
                worker.read = shard.position
            return
        self.push(worker)

    def push(self, worker: _Worker) -> None:
        shard, job = self.shard, self.shard.job
        bounds = [job.tables[table].consistency.bound for table in shard.tables]
        bound = max(b for b in bounds if b is not None)
        update = jobs.update(shard, worker.task, worker=worker.number, sequence=worker.sequence + 1, read=worker.read)
        if self.lacks(worker, bound):
            before = shard.state()
            with pytest.raises(ExchangeError, match=r"may be (read|from)"):
                shard.apply(update)
            jobs.assert_same(before, shard.state())
            worker.read = -1
            return
        self.worst = max(self.worst, job.clock(worker.task) - shard.completed)
        shard.apply(update)
        self.applied.append(self.applied[-1] | {worker.task})
        worker.sequence, worker.task, worker.read = worker.sequence + 1, -1, -1


@given(bound=st.integers(0, 3), pieces=st.integers(1, 3), workers=st.integers(1, 5), seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_the_bound_is_never_exceeded(bound: int, pieces: int, workers: int, seed: int) -> None:
    text = f"ssp({bound})"
    world = _World(jobs.job(text, text, pieces=pieces), workers, Random(seed))
    for _ in range(60):
        world.step(patient=True)
    assert world.worst <= bound


@given(bound=st.integers(0, 2), pieces=st.integers(1, 3), seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_who_does_not_wait_is_refused_just_when_it_breaks_the_bound(bound: int, pieces: int, seed: int) -> None:
    text = f"ssp({bound})"
    world = _World(jobs.job(text, text, pieces=pieces), 4, Random(seed))
    for _ in range(60):
        world.step(patient=False)


def test_the_bound_lets_a_fast_worker_run_ahead_and_no_further() -> None:
    shard = jobs.begun(jobs.job("ssp(2)", "ssp(2)", pieces=2))
    for clock in range(3):  # task 2 * clock + 1 is that of a worker which hangs
        assert shard.ready(jobs.DENSE, clock)
        shard.apply(jobs.update(shard, 2 * clock, worker=1))
    assert not shard.ready(jobs.DENSE, 3)
    assert shard.missing(jobs.DENSE, 3) == (1,)
    with pytest.raises(ExchangeError, match=r"clock 3.*below 1 are applied; missing are \[1\]"):
        shard.apply(jobs.update(shard, 6, worker=1))
    shard.apply(jobs.update(shard, 1, worker=2))
    assert shard.ready(jobs.DENSE, 3)
    shard.apply(jobs.update(shard, 6, worker=1))


def test_an_old_read_is_refused_though_the_shard_has_caught_up() -> None:
    shard = jobs.begun(jobs.job("ssp(1)", "ssp(1)", pieces=1))
    for task in range(3):
        shard.apply(jobs.update(shard, task, read=shard.position))
    with pytest.raises(ExchangeError, match=r"clock 3 and was computed from position 1; .* may be from 2 on"):
        shard.apply(jobs.update(shard, 3, read=1))
    assert shard.apply(jobs.update(shard, 3, read=2)).staleness == 1


def test_a_read_of_the_future_is_refused() -> None:
    shard = jobs.begun(jobs.job("asp", "asp"))
    with pytest.raises(ExchangeError, match="computed from position 4, and the shard is at 0"):
        shard.apply(jobs.update(shard, 0, read=4))


def test_tables_have_their_own_bounds() -> None:
    shard = jobs.begun(jobs.job("bsp", "ssp(1)", pieces=1))
    assert shard.ready(jobs.ROWS, 1) and not shard.ready(jobs.DENSE, 1)
    rows = jobs.parts(shard, 1, [jobs.ROWS])
    dense = jobs.parts(shard, 1, [jobs.DENSE])
    with pytest.raises(ExchangeError, match="table weight may be read once all tasks of clocks below 1"):
        shard.apply(Update(1, 1, (1,), 0, 1.0, dense + rows))
    shard.apply(Update(1, 1, (1,), 0, 1.0, rows))
    shard.apply(Update(2, 1, (0,), 0, 1.0, jobs.parts(shard, 0)))
    assert shard.completed == 2


def test_missing_tasks_are_named_a_few_at_a_time() -> None:
    shard = jobs.begun(jobs.job("bsp", "asp", pieces=40))
    assert shard.missing(jobs.DENSE, 10**15) == tuple(range(16))
    assert shard.missing(jobs.ROWS, 10**15) == ()
    assert shard.ready(jobs.ROWS, 10**15)


def test_staleness_is_counted_and_may_damp() -> None:
    plain, damped = (jobs.begun(jobs.job("asp", "asp", damp_stale=damp)) for damp in (False, True))
    by_hand = jobs.begun(jobs.job("asp", "asp"))
    for shard in (plain, damped, by_hand):
        for task in range(3):
            shard.apply(jobs.update(shard, task, read=shard.position))
    stale = jobs.update(plain, 3, read=0)
    assert plain.apply(stale).staleness == damped.apply(stale).staleness == 3
    smaller = tuple(part._replace(values=part.values / 4) for part in stale.parts)
    by_hand.apply(Update(stale.worker, stale.sequence, stale.tasks, 0, 1.0, smaller))
    jobs.assert_same(damped.state(), by_hand.state())
    assert not torch.equal(plain.read(jobs.DENSE), damped.read(jobs.DENSE))


def test_synchronous_pieces_are_never_stale() -> None:
    shard = jobs.begun(jobs.job(pieces=2, damp_stale=True))
    assert [shard.apply(jobs.update(shard, task, read=0)).staleness for task in (0, 1)] == [0, 0]


def test_shard_of_many_has_what_its_bounds_need() -> None:
    shard = Shard(jobs.job("ssp(0)", "ssp(3)", pieces=1), 0)
    for task in range(20):
        shard.apply(Update(1, task + 1, (task,), -1, 1.0, ()))
    assert [clock for clock, _ in shard.state().meta["clocks"]["reached"]] == [17, 18, 19, 20]
