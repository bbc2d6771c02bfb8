"""Rows are made by updates, read as they begin before that, and copied whole or by increments."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ExchangeError
from paceline.exchange.job import Initializer, Rule
from paceline.exchange.table.sparse import Sparse

_KEYS = torch.tensor([0, -1, 2**63 - 1, -(2**63), 5])


def _table(implementation, rule="adagrad", dtype=torch.float64, scale=1.0, seed=4):
    return Sparse(3, dtype, Rule(rule, {"lr": 0.1}), Initializer("normal", scale), seed, implementation)


def _read(table, keys=_KEYS):
    out = torch.full((len(keys), table.width), torch.nan, dtype=table.dtype)
    table.read(keys, out)
    return out


def test_reading_makes_no_row_and_an_update_begins_where_a_read_was(implementation):
    table = _table(implementation, "sgd")
    begun = _read(table)
    assert len(table) == 0 and begun.unique().numel() == begun.numel()
    assert torch.equal(_read(table, _KEYS.flip(0)), begun.flip(0))
    gradient = torch.ones(2, 3, dtype=torch.float64)
    table.update(_KEYS[[3, 0]], gradient)
    assert len(table) == 2
    assert table.state()["keys"].tolist() == _KEYS[[3, 0]].tolist()
    now = _read(table)
    assert torch.equal(now[[1, 2, 4]], begun[[1, 2, 4]])
    torch.testing.assert_close(now[[0, 3]], begun[[0, 3]] - 0.1, rtol=0, atol=1e-15)


def test_beginnings_are_of_the_seed(implementation):
    assert not torch.isclose(_read(_table(implementation, seed=4)), _read(_table(implementation, seed=5))).any()


def test_many_rows_keep_their_values(implementation):
    table = Sparse(2, torch.float32, Rule("sgd", {"lr": 1.0}), Initializer(), 0, implementation)
    keys = torch.arange(0, 40_000 * 1024, 1024)  # grows the index and adds slabs
    values = torch.stack([keys.float(), -keys.float()], 1)
    for part in keys.split(999):
        table.add(part, values[part // 1024])
    assert len(table) == len(keys)
    out = torch.empty_like(values)
    assert table.read(keys, out) == 0 and torch.equal(out, values)
    absent = torch.empty(5, 2)
    assert table.read(keys[:5] + 1, absent) == 5 and not absent.any()
    assert 0 < table.memory_bytes < 40_000 * 200


def test_a_key_that_comes_twice_counts_twice_in_order(implementation):
    once, twice = _table(implementation), _table(implementation)
    gradients = torch.arange(12, dtype=torch.float64).reshape(4, 3)
    twice.update(torch.tensor([7, 8, 7, 7]), gradients)
    for key, gradient in zip((7, 8, 7, 7), gradients, strict=True):
        once.update(torch.tensor([key]), gradient[None])
    assert all(torch.equal(x, y) for x, y in zip(once.state().values(), twice.state().values(), strict=True))


def test_increments_and_what_they_hold(implementation):
    table, copy = _table(implementation, "adam"), _table(implementation, "adam")
    gradient = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table.update(_KEYS, gradient)
    assert table.touched() == 5
    copy.load(table.state())
    table.clear_touched()
    assert table.touched() == 0 and len(table.state(since_marks=True)["keys"]) == 0
    table.update(torch.tensor([5, 6]), gradient[:2])
    increment = table.state(since_marks=True)
    assert increment["keys"].tolist() == [5, 6] and increment["step"].tolist() == [2, 1]
    copy.load(increment)
    for both in (table, copy):
        both.update(_KEYS, gradient)
    assert all(torch.equal(x, y) for x, y in zip(table.state().values(), copy.state().values(), strict=True))


def test_steps_beyond_the_first_tables_go_on_after_a_load(implementation):
    table, copy = _table(implementation, "adam"), _table(implementation, "adam")
    keys, gradient = _KEYS[:1], torch.ones(1, 3, dtype=torch.float64)
    for _ in range(1500):
        table.update(keys, gradient)
    copy.load(table.state())
    for both in (table, copy):
        both.update(keys, gradient * 3)
    assert copy.state()["step"].tolist() == [1501]
    assert torch.equal(_read(table), _read(copy))


def test_reads_into_other_memory(implementation):
    table = _table(implementation)
    table.update(_KEYS, torch.ones(5, 3, dtype=torch.float64))
    wide = torch.zeros(5, 6, dtype=torch.float64)
    table.read(_KEYS, wide[:, ::2])
    assert torch.equal(wide[:, ::2], _read(table)) and not wide[:, 1::2].any()
    narrow = torch.zeros(5, 3, dtype=torch.bfloat16)
    table.read(_KEYS, narrow)
    assert torch.equal(narrow, _read(table).bfloat16())


def test_nothing_is_read_or_updated_of_no_keys(implementation):
    table = _table(implementation)
    table.update(_KEYS[:0], torch.empty(0, 3, dtype=torch.float64))
    assert table.read(_KEYS[:0], torch.empty(0, 3, dtype=torch.float64)) == 0
    assert len(table) == 0 and all(len(x) == 0 for x in table.state().values())


def test_what_does_not_fit_is_explained_and_changes_nothing(implementation):
    table = _table(implementation)
    with pytest.raises(ExchangeError, match=r"5 keys .* values of \(4, 3\); they are of \(5, 3\)"):
        table.update(_KEYS, torch.ones(4, 3))
    with pytest.raises(ExchangeError, match=r"keys are torch.int32"):
        table.update(_KEYS.int(), torch.ones(5, 3))
    with pytest.raises(ExchangeError, match="lacks 'sum'"):
        table.load(_table(implementation, "sgd").state())
    with pytest.raises(ExchangeError, match="of another job"):
        table.load(_table(implementation, dtype=torch.float32).state())
    with pytest.raises(ExchangeError, match="under the rule ftrl"):
        _table(implementation, "ftrl").add(_KEYS, torch.ones(5, 3))
    with pytest.raises(ExchangeError, match="from 1"):
        Sparse(0, torch.float32, Rule(), Initializer(), 0, implementation)
    with pytest.raises(ExchangeError, match=r"torch.bfloat16; it is one of torch.float32"):
        Sparse(1, torch.bfloat16, Rule(), Initializer(), 0, implementation)
    with pytest.raises(ExchangeError, match="Did you mean 'normal'"):
        Sparse(1, torch.float32, Rule(), Initializer("norml"), 0, implementation)
    assert len(table) == 0


@pytest.mark.parametrize("bounds", [[0, 2], [0, 2, 6], [-1, 2, 5], [0, 3, 2], []])
def test_several_tables_take_no_keys_that_are_not_there(implementation, bounds):
    tables = [_table(implementation), _table(implementation)]
    with pytest.raises((ValueError, IndexError)):
        Sparse.update_several(tables, bounds, _KEYS, torch.ones(5, 3, dtype=torch.float64))
    with pytest.raises((ValueError, IndexError)):
        Sparse.read_several(tables, bounds, _KEYS, torch.empty(5, 3, dtype=torch.float64))
    assert not any(map(len, tables))
