"""Rules are torch.optim's where it has them, and what their papers say where it has not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.job import Initializer, Rule
from paceline.exchange.table.dense import Dense
from paceline.exchange.table.rules import RULES, rule_of
from paceline.exchange.table.sparse import Sparse

_STEPS = 12
_ROWS, _WIDTH = 7, 5
_FACTORS = [1.0] * 6 + [0.5, 2.0, 2.0, 0.25, 0.0, 1.0]  # of the learning rate, by step
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

as_torch = pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        (Rule("sgd", {"lr": 0.1}), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Rule("sgd", {"lr": 0.1, "weight_decay": 0.2}), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2)),
        (Rule("momentum", {"lr": 0.1}), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (
            Rule("momentum", {"lr": 0.1, "momentum": 0.7, "nesterov": 1, "weight_decay": 0.1}),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7, nesterov=True, weight_decay=0.1),
        ),
        (Rule("adagrad", {"lr": 0.1}), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        (
            Rule("adagrad", {"lr": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
            lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.3),
        ),
        (Rule("adam", {"lr": 0.1}), lambda p: torch.optim.Adam(p, lr=0.1)),
        (
            Rule("adam", {"beta1": 0.5, "beta2": 0.75, "eps": 1e-3, "weight_decay": 0.1}),
            lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.1),
        ),
        (
            Rule("adam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": 1}),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        ),
    ],
    ids=lambda one: f"{one.name}-{len(one.options)}" if isinstance(one, Rule) else "",
)


def _gradients(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_STEPS, _ROWS, _WIDTH, dtype=torch.float64, generator=generator)


def _trained(optimizer: Optimizer, start: Tensor, gradients: Tensor, factors: list[float]) -> Tensor:
    parameter = torch.nn.Parameter(start.clone())
    steps = optimizer([parameter])
    rate = steps.param_groups[0]["lr"]
    for gradient, factor in zip(gradients, factors, strict=True):
        steps.param_groups[0]["lr"] = rate * factor
        parameter.grad = gradient.clone()
        steps.step()
    return parameter.detach()


@as_torch
def test_dense_is_torch(implementation, rule, optimizer):
    gradients = _gradients(0)
    start = _gradients(1)[0]
    table = Dense(start.numel(), torch.float64, rule, implementation)
    table.fill(start.flatten())
    for gradient, factor in zip(gradients, _FACTORS, strict=True):
        table.update(gradient.flatten(), factor)
    expected = _trained(optimizer, start, gradients, _FACTORS)
    torch.testing.assert_close(table.values.view_as(start), expected, rtol=0, atol=1e-12)


@as_torch
def test_sparse_is_torch_on_the_rows_it_is_given(implementation, rule, optimizer):
    gradients = _gradients(0)
    table = Sparse(_WIDTH, torch.float64, rule, Initializer("normal", 0.5), 3, implementation)
    keys = torch.arange(_ROWS) * -(10**17) + 5
    start = torch.empty(_ROWS, _WIDTH, dtype=torch.float64)
    assert table.read(keys, start) == _ROWS
    for step, gradient in enumerate(gradients):
        some = torch.arange(step % 2, _ROWS, 2)
        table.update(keys[some], gradient[some], _FACTORS[step])
    got = torch.empty_like(start)
    assert table.read(keys, got) == 0
    for row in range(_ROWS):
        expected = _trained(optimizer, start[row], gradients[row % 2 :: 2, row], _FACTORS[row % 2 :: 2])
        torch.testing.assert_close(got[row], expected, rtol=0, atol=1e-12)


def test_rowwise_adagrad_keeps_the_sum_of_mean_squares(implementation):
    table = Sparse(
        3, torch.float64, Rule("rowwise_adagrad", {"lr": 0.5}), Initializer("uniform", 1.0), 0, implementation
    )
    key = torch.tensor([9])
    value = torch.empty(1, 3, dtype=torch.float64)
    table.read(key, value)
    total = 0.0
    for gradient in _gradients(0)[:, :1, :3]:
        table.update(key, gradient)
        total += float((gradient * gradient).mean())
        value -= 0.5 * gradient / math.sqrt(total)
    got = torch.empty_like(value)
    table.read(key, got)
    torch.testing.assert_close(got, value, rtol=0, atol=1e-9)
    assert table.state()["sum"].shape == (1,)


@pytest.mark.parametrize("l1", [0.0, 0.4])
def test_ftrl_is_algorithm_1(implementation, l1):
    alpha, beta, l2 = 0.3, 0.8, 0.05
    table = Dense(1, torch.float64, Rule("ftrl", {"lr": alpha, "beta": beta, "l1": l1, "l2": l2}), implementation)
    z = n = 0.0
    for gradient in _gradients(4).flatten().tolist()[:40]:
        weight = 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)
        assert float(table.values) == pytest.approx(weight, abs=1e-12)
        sigma = (math.sqrt(n + gradient * gradient) - math.sqrt(n)) / alpha
        z += gradient - sigma * weight
        n += gradient * gradient
        table.update(torch.tensor([gradient], dtype=torch.float64))
    assert n > 10


def test_ftrl_begins_where_a_parameter_is(implementation):
    table = Dense(3, torch.float64, Rule("ftrl", {"l1": 0.4, "l2": 0.1}), implementation)
    begun = torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64)
    table.fill(begun)
    table.update(torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(table.values, begun, rtol=0, atol=1e-15)


def test_a_wrong_rule_is_explained():
    with pytest.raises(ExchangeError, match=r"unknown update rule 'adagrd'.*Did you mean 'adagrad'"):
        rule_of(Rule("adagrd"))
    with pytest.raises(ExchangeError, match=r"has no option 'momentun'.*Did you mean 'momentum'"):
        rule_of(Rule("momentum", {"momentun": 0.9}))
    with pytest.raises(ExchangeError, match="below 1"):
        rule_of(Rule("adam", {"beta2": 1.0}))
    with pytest.raises(ExchangeError, match="from 0"):
        rule_of(Rule("sgd", {"lr": -1.0}))
    with pytest.raises(ExchangeError, match="for sparse tables"):
        Dense(3, torch.float32, Rule("rowwise_adagrad"))
    with pytest.raises(ExchangeError, match=r"0 .no. or 1"):
        rule_of(Rule("momentum", {"nesterov": 0.5}))


def test_names():
    assert all(kind.name == name and kind.summary for name, kind in RULES.items())
