"""What all processes of a job agree on survives JSON, and shards divide keys evenly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Mode, Rule, SparseTable
from paceline.exchange.layout import dense_ranges, shards_of
from paceline.exchange.messages import Payload, Slice, packed, unpacked
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address, Move, View

JOB = Job(
    (
        DenseTable("a.weight", (300, 40), rule=Rule("adam", {"lr": 0.1}), consistency=Consistency.parse("ssp(2)")),
        SparseTable(
            "rows", 8, "float64", Rule("ftrl"), Consistency.parse("downpour(3, 2)"), Initializer("normal", 0.1)
        ),
        DenseTable("a.bias", (40,)),
    ),
    shards=5,
    pieces=3,
)


def test_a_charter_survives_its_file(tmp_path: Path) -> None:
    charter = Charter(JOB, Terms(12), Address("127.0.0.1", 4, "/tmp/s", "here"), store="redis://localhost:1/0")
    directory = Directory(tmp_path / "exchange")
    directory.write(charter)
    assert directory.read() == charter
    assert directory.secret.stat().st_mode & 0o777 == 0o600
    assert len(directory.read_secret()) == 64


def test_no_job_is_said(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match=r"has no charter\.json"):
        Directory(tmp_path).read()


def test_a_view_survives_json_and_knows_successors() -> None:
    view = View(7, {1: Address("h", 2), 4: Address()}, ((1, 4), (4,)), (Move(1, 4, 1),), 3)
    assert View.from_dict(json.loads(json.dumps(view.to_dict()))) == view
    assert (view.head(0), view.tail(0)) == (1, 4)
    assert [view.successor(0, 1), view.successor(0, 4), view.successor(1, 4), view.successor(1, 1)] == [
        4,
        None,
        1,
        None,
    ]


@pytest.mark.parametrize("text", ["bsp", "ssp(0)", "ssp(4)", "asp", "downpour(5, 2)"])
def test_consistency_is_read_and_written(text: str) -> None:
    assert str(Consistency.parse(text)) == text


@pytest.mark.parametrize("text", ["bsp(1)", "ssp", "ssp(1, 2)", "async", "downpour(0, 1)", ""])
def test_other_consistency_is_refused(text: str) -> None:
    with pytest.raises(ExchangeError, match="cannot read the consistency"):
        Consistency.parse(text)


def test_modes_have_summaries() -> None:
    assert all(mode.summary for mode in Mode)


@given(
    shapes=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=2).map(tuple), min_size=1, max_size=6),
    shards=st.integers(1, 20),
)
def test_ranges_cover_each_element_once(shapes: list[tuple[int, ...]], shards: int) -> None:
    job = Job(tuple(DenseTable(str(i), shape) for i, shape in enumerate(shapes)), shards=shards)
    ranges = dense_ranges(job)
    for index, table in enumerate(job.tables):
        held = [r for r in ranges if r.table == index]
        assert [r.start for r in held] == [0, *(r.stop for r in held[:-1])]
        assert held[-1].stop == table.count
    assert all(0 <= r.shard < shards for r in ranges)


def test_keys_spread_over_shards() -> None:
    keys = np.arange(-50_000, 50_000, dtype=np.int64)
    shards = shards_of(keys, 16)
    assert np.bincount(shards, minlength=16).max() < 1.1 * len(keys) / 16
    assert (shards_of(keys[::-1].copy(), 16)[::-1] == shards).all()


def test_payloads_survive_packing() -> None:
    keys, values, whole = torch.arange(5), torch.rand(5, 2), torch.rand(7)
    payloads = [
        Payload(1, 0, (Slice(0, 0, 2), Slice(3, 2, 5)), (keys, values)),
        Payload(0, 0, (Slice(2, 0, 7),), (whole,)),
        Payload(2, 0, ()),
    ]
    numbers = np.array(packed(payloads), dtype=np.int64)
    assert unpacked(numbers, (keys, values, whole)) == payloads
    with pytest.raises(ValueError):
        unpacked(numbers[:-5], (keys, values, whole))
    with pytest.raises(ValueError):
        unpacked(numbers, (keys,))
