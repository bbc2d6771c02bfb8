"""What is cut up by shards comes together again; gradients know from which positions they were computed."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.exchange.client.reads import ReadPositions
from paceline.exchange.client.routes import DenseRoutes, joined, routed
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.layout import dense_ranges, shards_of


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=5), st.integers(1, 9))
def test_slices_hold_each_element_once(counts: list[int], shards: int) -> None:
    made = Job(tuple(DenseTable(f"t{i}", (count,)) for i, count in enumerate(counts)), shards=shards)
    routes = DenseRoutes(made)
    for table, count in enumerate(counts):
        flat, back = torch.arange(count), torch.full((count,), -1)
        slices = routes.of(table)
        assert [held.shard for held in slices] == sorted({r.shard for r in dense_ranges(made) if r.table == table})
        for held in slices:
            values = held.of(flat)
            assert values.shape == (held.count,) and torch.equal(values, values.sort().values)
            held.put(values, back)
        assert torch.equal(back, flat)


@settings(max_examples=50)
@given(st.sets(st.integers(-(2**63), 2**63 - 1), max_size=200), st.integers(1, 9), st.data())
def test_keys_are_sorted_by_shard(given_keys: set[int], shards: int, data: st.DataObject) -> None:
    keys = torch.tensor(list(given_keys), dtype=torch.int64)
    found = routed(keys, shards)
    assert torch.equal(found.keys, keys[found.order])
    owners = shards_of(found.keys.numpy(), shards).tolist()
    for shard in range(shards):
        assert owners[found.bounds[shard] : found.bounds[shard + 1]] == [shard] * owners.count(shard)
    assert found.shards == sorted(set(owners))
    some = sorted(data.draw(st.sets(st.integers(0, shards - 1), min_size=1)))
    runs = found.runs(some)
    if runs:
        wanted = [key for key, owner in zip(found.keys.tolist(), owners, strict=True) if owner in some]
        assert joined(found.keys, runs).tolist() == wanted
        assert all(one[1] < other[0] for one, other in itertools.pairwise(runs))


def test_a_push_names_the_oldest_position_that_it_rests_on() -> None:
    reads = ReadPositions()
    assert reads.pushed([0], 2) == [-1, -1]
    reads.read([0, 1], {0: 5, 1: 7})
    reads.read([2], {0: 6})
    assert reads.pushed([0, 1, 2], 2) == [5, 7]
    assert reads.pushed([0, 1, 2], 2) == [5, 7]  # nothing was read since
    reads.read([2], {0: 9})  # rows are read for each task, dense tables for every other one
    assert reads.pushed([0, 2], 2) == [5, 7]
    reads.read([2], {0: 9})  # of tables that are neither read nor pushed to nothing is said
    assert reads.pushed([2], 2) == [9, -1]
    reads.read([0, 1], {0: 10, 1: 11})
    reads.read([0, 1], {0: 12, 1: 13})  # two tasks in one push
    reads.read([2], {0: 12})
    assert reads.pushed([0], 2) == [10, 11]


@pytest.mark.parametrize("count", [0, 1])
def test_no_keys_are_no_runs(count: int) -> None:
    found = routed(torch.arange(count), 3)
    assert len(found.shards) == count and len(found.runs(range(3))) == count
