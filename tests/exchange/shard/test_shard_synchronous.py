"""BSP: a step is the weighted mean of its pieces, in whatever order they come, and equals serial training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.exchange.job import DenseTable, Job, Rule
from paceline.exchange.shard.shard import Shard
from paceline.exchange.updates import Part, Update
from tests.exchange.shard import jobs

STEPS = 3


def _train(job: Job, orders: list[list[int]], weights: list[float]) -> Shard:
    shard = jobs.begun(job)
    sequence = 0
    for clock, order in enumerate(orders):
        pieces = [
            jobs.update(shard, clock * job.pieces + i, weight=weights[i])._replace(worker=i + 1)
            for i in range(job.pieces)
        ]
        assert shard.completed == clock
        for i in order:
            sequence += 1
            assert shard.apply(pieces[i]._replace(sequence=clock + 1)).position == sequence
    assert shard.completed == len(orders)
    return shard


@given(
    orders=st.lists(st.permutations(range(4)), min_size=STEPS, max_size=STEPS),
    weights=st.lists(st.floats(0.1, 90), min_size=4, max_size=4),
    dtype=st.sampled_from(["float32", "float64"]),
)
@settings(max_examples=25)
def test_any_order_of_pieces_gives_the_same_bits(orders: list[list[int]], weights: list[float], dtype: str) -> None:
    job = jobs.job(pieces=4, dtype=dtype, shards=1)
    jobs.assert_equal_tables(_train(job, orders, weights), _train(job, [list(range(4))] * STEPS, weights))


def test_a_step_is_one_step_of_serial_training() -> None:
    job = jobs.job(pieces=3, dtype="float64", shards=1, rule=Rule("momentum", {"lr": 0.1, "momentum": 0.9}))
    shard = jobs.begun(job)
    weight = shard.read(jobs.DENSE).clone()
    momentum = torch.zeros_like(weight)
    weights = (2.0, 3.0, 5.0)
    for clock in range(STEPS):
        updates = [jobs.update(shard, 3 * clock + i, weight=w) for i, w in enumerate(weights)]
        mean = sum(w * u.parts[0].values for w, u in zip(weights, updates, strict=True)) / 10
        for update in reversed(updates):
            shard.apply(update)
        momentum = 0.9 * momentum + mean
        weight -= 0.1 * momentum
        torch.testing.assert_close(shard.read(jobs.DENSE), weight, rtol=1e-13, atol=1e-13)


def test_rows_of_several_pieces_are_updated_once() -> None:
    job = jobs.job(pieces=2, shards=1, dtype="float64", rule=Rule("adagrad", {"lr": 1.0}))
    shard = Shard(job, 0)
    before = torch.empty(3, 3, dtype=torch.float64)
    keys = torch.tensor([3, 4, 5])
    shard.read_rows(jobs.ROWS, keys, before)
    dense = Part(jobs.DENSE, None, torch.zeros(70, dtype=torch.float64))
    one, two = torch.full((2, 3), 3.0, dtype=torch.float64), torch.full((2, 3), 6.0, dtype=torch.float64)
    shard.apply(Update(1, 1, (1,), -1, 1.0, (dense, Part(jobs.ROWS, torch.tensor([4, 5]), two))))
    assert len(shard.table(jobs.ROWS)) == 0
    shard.apply(Update(2, 1, (0,), -1, 2.0, (dense, Part(jobs.ROWS, torch.tensor([3, 4]), one))))
    expected = torch.tensor([2.0, 4.0, 2.0], dtype=torch.float64)[:, None].expand(3, 3)
    after = torch.empty_like(before)
    shard.read_rows(jobs.ROWS, keys, after)
    # Adagrad's first step is lr * g / |g|: twice as many steps would show.
    torch.testing.assert_close(before - after, torch.ones_like(before))
    state = shard.table(jobs.ROWS).state()
    torch.testing.assert_close(state["sum"][torch.argsort(state["keys"])], expected**2)


def test_a_piece_without_gradients_counts_as_zeros() -> None:
    job = jobs.job(pieces=2, shards=1, rule=Rule("sgd", {"lr": 1.0}))
    shard = Shard(job, 0)
    shard.apply(Update(1, 1, (0,), -1, 1.0, (Part(jobs.DENSE, None, torch.ones(70)),)))
    shard.apply(Update(1, 2, (1,), -1, 3.0, ()))
    assert torch.equal(shard.read(jobs.DENSE), torch.full((70,), -0.25))


def test_a_step_without_weight_changes_nothing() -> None:
    shard = Shard(jobs.job(pieces=1, shards=1, rule=Rule("sgd", {"lr": 1.0})), 0)
    shard.apply(Update(1, 1, (0,), -1, 0.0, (Part(jobs.DENSE, None, torch.ones(70)),)))
    assert not shard.read(jobs.DENSE).any()
    assert shard.completed == 1


def test_pieces_may_come_before_the_clock_before_is_whole() -> None:
    """A worker whose rows are all elsewhere is ahead of this shard, and has nothing for it."""
    job = replace(jobs.job(pieces=2, shards=1), tables=jobs.job().tables[1:])
    shard = Shard(job, 0)
    keys = torch.tensor([7])
    gradient = Part(0, keys, torch.ones(1, 3))
    shard.apply(Update(1, 1, (2,), -1, 1.0, ()))
    shard.apply(Update(1, 2, (1,), -1, 1.0, (gradient,)))
    with pytest.raises(ExchangeError, match=r"clock 1, and table rows .* missing are \[0\]"):
        shard.apply(Update(2, 1, (3,), -1, 1.0, (gradient,)))
    shard.apply(Update(3, 1, (0,), -1, 1.0, (gradient,)))
    assert shard.completed == 1
    shard.apply(Update(2, 1, (3,), -1, 1.0, (gradient,)))
    assert shard.completed == 2
    state = shard.table(0).state()
    assert torch.equal(state["sum"], torch.full((1, 3), 1.25))


@pytest.mark.parametrize("copied_after", [1, 2])
def test_a_copy_in_the_midst_of_a_step_adds_up_rows_as_the_shard_itself(copied_after: int) -> None:
    """Also where no piece that comes after the copy has a row of the table."""
    job = jobs.job(pieces=3, shards=1, dtype="float64")
    shard = jobs.begun(job)
    row = Part(jobs.ROWS, torch.tensor([3, 4]), torch.ones(2, 3, dtype=torch.float64))
    updates = [
        Update(1, 1, (0,), -1, 1.0, (row,)),
        Update(2, 1, (1,), -1, 1.0, (row,)),
        Update(3, 1, (2,), -1, 1.0, ()),
    ]
    for update in updates[:copied_after]:
        shard.apply(update)
    copy = Shard.of(job, 0, shard.state())
    for update in updates[copied_after:]:
        shard.apply(update)
        copy.apply(update)
    assert shard.completed == 1
    jobs.assert_equal_tables(shard, copy)


def test_tasks_of_one_push_are_one_piece() -> None:
    job = jobs.job(pieces=3, shards=1, rule=Rule("sgd", {"lr": 1.0}))
    shard = Shard(job, 0)
    ones = Part(jobs.DENSE, None, torch.ones(70))
    shard.apply(Update(1, 1, (0, 2), -1, 2.0, (ones,)))
    shard.apply(Update(2, 1, (1,), -1, 1.0, (Part(jobs.DENSE, None, torch.full((70,), 4.0)),)))
    assert torch.equal(shard.read(jobs.DENSE), torch.full((70,), -2.0))
    with pytest.raises(ExchangeError, match="of several clocks"):
        shard.apply(Update(1, 2, (5, 6), -1, 2.0, (ones,)))


def test_sums_of_16_bits_are_of_32() -> None:
    tables = (DenseTable("weight", (8,), "bfloat16", Rule("sgd", {"lr": 1.0})),)
    shard = Shard(Job(tables, shards=1, pieces=2), 0)
    big, small = torch.full((8,), 256.0, dtype=torch.bfloat16), torch.full((8,), 1.0, dtype=torch.bfloat16)
    shard.apply(Update(1, 1, (0,), -1, 1.0, (Part(0, None, big),)))
    shard.apply(Update(1, 2, (1,), -1, 1.0, (Part(0, None, small),)))
    assert shard.table(0).state()["master"].tolist() == [-128.5] * 8


def test_what_is_given_may_change_afterwards() -> None:
    job = jobs.job(pieces=3)
    kept, changed = jobs.begun(job), jobs.begun(job)
    for task in (2, 0, 1):
        given = jobs.update(kept, task)
        kept.apply(given)
        parts = tuple(Part(t, k if k is None else k.clone(), v.clone()) for t, k, v in given.parts)
        again = given._replace(parts=parts)
        changed.apply(again)
        for part in again.parts:
            part.values.fill_(1e9)
            if part.keys is not None:
                part.keys.fill_(0)
    jobs.assert_same(kept.state(), changed.state())
