"""What a message has for each shard: slices of its tensors, whatever it says of them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.exchange.client.outgoing import Cutter
from paceline.exchange.client.pushes import Push
from paceline.exchange.client.routes import DenseRoutes
from paceline.exchange.interface import Rows
from paceline.exchange.job import Consistency, Job, SparseTable
from paceline.exchange.messages import Slice
from paceline.exchange.server.entry import cut, pushed, rows_pushed
from paceline.exchange.shard.together import RowPush
from paceline.exchange.wire.frame import Frame


@pytest.mark.parametrize(
    "bounds",
    [
        [(0, 3), (3, 3), (3, 10)],  # as it should be: in one call
        [(0, 3), (4, 10)],
        [(0, 5), (5, 3), (3, 10)],
        [(2, 4), (0, 10)],
        [(0, 3), (3, 99)],
        [],
    ],
)
def test_slices_are_those_of_python(bounds: list[tuple[int, int]]) -> None:
    values = torch.arange(20).view(10, 2)
    slices = [Slice(shard, begin, end) for shard, (begin, end) in enumerate(bounds)]
    found = cut(values, slices)
    assert [part.tolist() for part in found] == [values.tolist()[begin:end] for begin, end in bounds]
    assert all(part.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() for part in found)


_JOB = Job(tuple(SparseTable(name, 2, consistency=Consistency.parse("asp")) for name in ("one", "two")), shards=4)


def a_push() -> Frame:
    rows = {table: Rows(torch.arange(9) * (table + 1), torch.randn(9, 2)) for table in (0, 1)}
    outgoing = Cutter(_JOB, DenseRoutes(_JOB)).cut({}, rows, keep=False)
    return Push(5, 3, (7, 8), 1.0, [4, 3, 2, 1], outgoing).frame(range(4))


def assert_is_told_by(push: RowPush, frame: Frame) -> None:
    """What is read of a push as rows is what its entries say."""
    entries = pushed(frame, _JOB, borrowed=False)
    assert {entry.shard: entry.read for entry in entries} == push.reads
    for entry in entries:
        assert (entry.worker, entry.sequence, entry.tasks) == (push.worker, push.sequence, push.tasks)
        update = entry.update(_JOB)
        mine = [(rows, rows.shards.index(entry.shard)) for rows in push.rows if entry.shard in rows.shards]
        for part, (rows, at) in zip(update.parts, mine, strict=True):
            its = slice(rows.bounds[at], rows.bounds[at + 1])
            assert part.table == rows.table and part.keys is not None
            assert torch.equal(part.keys, rows.keys[its]) and torch.equal(part.values, rows.values[its])


def test_a_push_of_rows_is_read_whole() -> None:
    frame = a_push()
    push = rows_pushed(frame, _JOB)
    assert push is not None
    assert_is_told_by(push, frame)


@given(st.integers(0, 200), st.integers(-3, 12), st.integers(0, 5))
def test_a_push_that_is_damaged_is_read_as_its_entries_are_or_left_to_them(at: int, number: int, left: int) -> None:
    frame = a_push()
    numbers = frame.numbers.copy()
    numbers[at % len(numbers)] = number
    frame.numbers = np.resize(numbers, len(numbers) - left)
    push = rows_pushed(frame, _JOB)
    if push is not None:
        assert_is_told_by(push, frame)
        return
    with contextlib.suppress(ExchangeError):
        pushed(frame, _JOB, borrowed=False)
