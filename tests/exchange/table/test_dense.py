"""Dense ranges of all types, and their state."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ExchangeError
from paceline.exchange.job import Rule
from paceline.exchange.table.dense import Dense


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_updates_of_16_bits_add_up(implementation, dtype):
    table = Dense(3, dtype, Rule("sgd", {"lr": 1e-4}), implementation)
    table.fill(torch.ones(3))
    for _ in range(1000):
        table.update(torch.ones(3, dtype=dtype))
    assert table.values.dtype == dtype
    torch.testing.assert_close(table.values.float(), torch.full((3,), 0.9), rtol=0, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "adam", "ftrl"])
def test_a_loaded_table_goes_on_alike(implementation, dtype, rule):
    table, copy = (Dense(9, dtype, Rule(rule), implementation) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    table.fill(torch.randn(9, generator=generator))
    for _ in range(2000 if rule == "adam" else 3):
        table.update(torch.randn(9, generator=generator))
    copy.load({name: x.clone() for name, x in table.state().items()})
    gradient = torch.randn(9, generator=generator)
    for both in (table, copy):
        both.update(gradient)
    assert table.state().keys() == copy.state().keys()
    assert all(torch.equal(x, copy.state()[name]) for name, x in table.state().items())


def test_filling_begins_again(implementation):
    table, fresh = (Dense(2, torch.float64, Rule("adam"), implementation) for _ in range(2))
    table.update(torch.tensor([1.0, -2.0]))
    table.fill(torch.zeros(2))
    for both in (table, fresh):
        both.update(torch.tensor([3.0, 4.0]))
    assert torch.equal(table.values, fresh.values)


def test_differences_are_added_and_state_stays(implementation):
    table = Dense(2, torch.float64, Rule("momentum"), implementation)
    table.add(torch.tensor([1.0, 2.0]))
    assert table.values.tolist() == [1.0, 2.0] and not table.state()["momentum"].any()
    assert table.memory_bytes == 32


def test_what_does_not_fit_is_explained(implementation):
    table = Dense(2, torch.float64, Rule("adam"), implementation)
    with pytest.raises(ExchangeError, match=r"of \(2,\) elements was given \(3,\)"):
        table.update(torch.ones(3))
    with pytest.raises(ExchangeError, match="has nothing for 'mean'"):
        table.load({"values": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(ExchangeError, match="of another job"):
        table.load(Dense(3, torch.float64, Rule("adam"), implementation).state())
    with pytest.raises(ExchangeError, match=r"torch.int32; it is one of"):
        Dense(2, torch.int32, Rule(), implementation)
    with pytest.raises(ExchangeError, match="follow from its state"):
        Dense(2, torch.float32, Rule("ftrl"), implementation).add(torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_lent_stays_as_it_was(dtype):
    table = Dense(5, dtype, Rule("sgd", {"lr": 1.0}))
    first = table.lend()
    table.update(torch.ones(5, dtype=dtype))
    second = table.lend()
    table.add(torch.ones(5, dtype=dtype))
    third = table.lend()
    table.fill(torch.full((5,), 7.0))
    assert [lent[0].item() for lent in (first, second, third)] == [0, -1, 0]
    assert table.values.tolist() == [7.0] * 5


def test_what_is_given_back_costs_no_copy():
    table = Dense(5, torch.float32, Rule("sgd", {"lr": 1.0}))
    before = table.values
    lent = table.lend()
    del lent
    table.update(torch.ones(5))
    assert table.values is before
