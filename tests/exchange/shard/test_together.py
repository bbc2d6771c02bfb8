"""A push of rows that many shards take in one call is what each of them takes by itself, to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.rates import Rates
from paceline.exchange.shard.shard import Shard
from paceline.exchange.shard.together import RowPush, RowsOfShards, apply_together, read_together
from paceline.exchange.table.route import route
from paceline.exchange.updates import Applied, Part, Update
from tests.exchange.shard.jobs import assert_same

SHARDS, WIDTH = 3, 2


def two_tables(first: str = "asp", second: str = "ssp(1)", dense: str = "") -> Job:
    drawn = Initializer("normal", 0.1)
    rows = tuple(
        SparseTable(name, WIDTH, rule=Rule("adam", {"lr": 0.1}), consistency=Consistency.parse(how), initializer=drawn)
        for name, how in (("one", first), ("two", second))
    )
    more = (DenseTable("bias", (4,), consistency=Consistency.parse(dense)),) if dense else ()
    return Job(rows + more, shards=SHARDS, pieces=2, seed=3, rates=Rates.of((1.0, 0.5, 0.25)))


def rows_of(table: int, keys: torch.Tensor, draw: torch.Generator) -> RowsOfShards:
    """Rows of a table, by shard; shards that have none are not named."""
    order, offsets = route(keys, SHARDS)
    ends = offsets.tolist()
    numbers = [shard for shard in range(SHARDS) if ends[shard] < ends[shard + 1]]
    bounds = [0, *(ends[shard + 1] for shard in numbers)]
    return RowsOfShards(table, numbers, bounds, keys[order], torch.randn(len(keys), WIDTH, generator=draw))


def pushed(
    job: Job, sequence: int, tasks: tuple[int, ...], reads: Sequence[int], counts: Sequence[int], worker: int = 1
) -> RowPush:
    draw = torch.Generator().manual_seed(1000 * worker + sequence)
    rows = [
        rows_of(table, torch.randint(30, (count,), generator=draw).unique(), draw)
        for table, count in enumerate(counts)
        if count >= 0
    ]
    return RowPush(worker, sequence, tasks, dict(enumerate(reads)), tuple(rows))


def apart(push: RowPush, shard: int) -> Update:
    """What a shard gets of a push by itself."""
    parts = [
        Part(table, keys[bounds[at] : bounds[at + 1]], values[bounds[at] : bounds[at + 1]])
        for table, numbers, bounds, keys, values in push.rows
        for at, number in enumerate(numbers)
        if number == shard
    ]
    return Update(push.worker, push.sequence, push.tasks, push.reads[shard], 1.0, tuple(parts))


def one_by_one(shards: Sequence[Shard], push: RowPush) -> list[Applied] | str:
    try:
        for number in push.reads:
            shards[number].check(apart(push, number))
    except ExchangeError as error:
        return str(error)
    return [shards[number].apply(apart(push, number)) for number in push.reads]


step = st.tuples(
    st.integers(1, 2),  # worker
    st.integers(-1, 1),  # its next sequence, or one near it
    st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True).map(sorted),  # tasks, from the lowest one left
    st.lists(st.integers(-1, 4), min_size=SHARDS, max_size=SHARDS),  # how many updates ago shards were read
    st.lists(st.integers(-1, 12), min_size=2, max_size=2),  # rows of each table; -1: no payload
)


@given(st.sampled_from(["asp", "ssp(1)"]), st.sampled_from(["asp", "ssp(0)", "ssp(2)"]), st.lists(step, max_size=12))
def test_together_is_as_one_by_one(first, second, steps):
    job = two_tables(first, second)
    ours, theirs = ([Shard(job, number) for number in range(SHARDS)] for _ in range(2))
    sequences, floor = {1: 1, 2: 1}, 0
    for worker, off, tasks, ago, counts in steps:
        sequence = sequences[worker] + off
        reads = [
            shard.position - back if 0 <= back <= shard.position else -1 for shard, back in zip(ours, ago, strict=True)
        ]
        push = pushed(job, sequence, tuple(floor + task for task in tasks), reads, counts, worker)
        before = [shard.state() for shard in ours]
        expected = one_by_one(theirs, push)
        found = apply_together(dict(enumerate(ours)), push) if push.is_simple(job) else None
        if found is None:
            for shard, state in zip(ours, before, strict=True):
                assert_same(shard.state(), state)
            found = one_by_one(ours, push)
        assert found == expected
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one.state(), other.state())
        sequences[worker] = max(sequences[worker], sequence + 1)
        floor = 2 * ours[0].completed


def test_what_is_new_and_in_time_is_taken_together():
    job = two_tables()
    shards = {number: Shard(job, number) for number in range(SHARDS)}
    first = pushed(job, 1, (0,), [-1] * SHARDS, [20, 20])
    assert apply_together(shards, first) == [Applied(1, 0, False)] * SHARDS
    second = pushed(job, 2, (1,), [0] * SHARDS, [20, 20])
    assert apply_together(shards, second) == [Applied(2, 1, False)] * SHARDS
    assert apply_together(shards, second) is None  # it comes again
    late = pushed(job, 3, (6,), [2] * SHARDS, [20, 20])
    assert apply_together(shards, late) is None  # beyond the bound of table two
    assert [shard.position for shard in shards.values()] == [2] * SHARDS


def test_a_synchronous_step_is_not_taken_together():
    job = two_tables(dense="bsp")
    shards = {number: Shard(job, number) for number in range(SHARDS)}
    holding = [number for number, shard in shards.items() if 2 in shard.tables]
    assert holding and apply_together(shards, pushed(job, 1, (0,), [-1] * SHARDS, [20, 20])) is None


def broken() -> dict[str, RowPush]:
    push = pushed(two_tables(), 1, (0,), [-1] * SHARDS, [20, -1])
    _, numbers, bounds, keys, values = push.rows[0]
    swapped = [numbers[1], numbers[0], *numbers[2:]]

    def of(**changed: object) -> RowPush:
        return push._replace(rows=(push.rows[0]._replace(**changed),))

    return {
        "no sequence": push._replace(sequence=0),
        "no task": push._replace(tasks=()),
        "tasks that fall": push._replace(tasks=(1, 0)),
        "a task below 0": push._replace(tasks=(-1,)),
        "no shard": push._replace(reads={}, rows=()),
        "a shard that is not told": push._replace(reads={numbers[0]: -1}),
        "a table twice": push._replace(rows=push.rows * 2),
        "no table": of(table=2),
        "a table below 0": of(table=-1),
        "keys of other shards": of(shards=swapped),
        "a shard twice": of(shards=[numbers[0]] * len(numbers)),
        "too few bounds": of(bounds=bounds[:-1]),
        "keys left over": of(bounds=[*bounds[:-1], bounds[-1] - 1]),
        "keys of another type": of(keys=keys.int()),
        "rows of another width": of(values=values[:, :1]),
        "too few rows": of(values=values[1:]),
        "rows of another type": of(values=values.double()),
    }


@pytest.mark.parametrize("name", broken())
def test_what_may_be_wrong_is_left_to_each_shard(name):
    assert not broken()[name].is_simple(two_tables())


@pytest.mark.parametrize("changed", [{"damp_stale": True}, {"notes_changes": True}])
def test_what_needs_more_is_left_to_each_shard(changed):
    job = Job(two_tables().tables, shards=SHARDS, pieces=2, **changed)
    assert not pushed(job, 1, (0,), [-1] * SHARDS, [20, 20]).is_simple(job)


def test_reading_together_is_as_one_by_one():
    job = two_tables()
    shards = [Shard(job, number) for number in range(SHARDS)]
    one_by_one(shards, pushed(job, 1, (0,), [-1] * SHARDS, [20, 20]))
    given_rows = rows_of(1, torch.arange(40), torch.Generator())
    out = torch.empty(40, WIDTH)
    read_together([shards[number] for number in given_rows.shards], 1, given_rows.bounds, given_rows.keys, out)
    for at, number in enumerate(given_rows.shards):
        begin, end = given_rows.bounds[at : at + 2]
        each = torch.empty(end - begin, WIDTH)
        shards[number].read_rows(1, given_rows.keys[begin:end], each)
        assert torch.equal(out[begin:end], each)
    with pytest.raises(KeyError):
        read_together(shards[:1], 2, [0, 0], torch.empty(0, dtype=torch.int64), torch.empty(0, WIDTH))
