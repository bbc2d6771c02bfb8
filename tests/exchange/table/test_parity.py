"""Native code and numpy give the same bits, and so do two processors that round as IEEE 754 says."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.exchange.job import Initializer, Rule
from paceline.exchange.table.choice import Choice
from paceline.exchange.table.dense import Dense
from paceline.exchange.table.route import route, unique_keys, unique_rows
from paceline.exchange.table.rules import RULES
from paceline.exchange.table.sparse import Sparse
from tests.exchange.table.implementations import made

# Options that use every branch of a formula.
_RULES = [Rule(name, {"lr": 0.05}) for name in RULES] + [
    Rule("sgd", {"weight_decay": 0.01}),
    Rule("momentum", {"weight_decay": 0.01, "nesterov": 1}),
    Rule("adagrad", {"weight_decay": 0.01, "initial_accumulator_value": 0.1}),
    Rule("rowwise_adagrad", {"initial_accumulator_value": 0.1}),
    Rule("adam", {"weight_decay": 0.01}),
    Rule("adam", {"weight_decay": 0.01, "decoupled_weight_decay": 1, "beta1": 0.5, "beta2": 0.6}),
    Rule("ftrl", {"l1": 0.3, "l2": 0.1}),
]
_DTYPES = [torch.float32, torch.float64]

rules = pytest.mark.parametrize("rule", _RULES, ids=str)
dtypes = pytest.mark.parametrize("dtype", _DTYPES, ids=str)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return (
        ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.numpy().tobytes() == theirs.numpy().tobytes()
    )


def same_state(ours: Dense | Sparse, theirs: Dense | Sparse) -> bool:
    mine, other = ours.state(), theirs.state()
    return list(mine) == list(other) and all(same_bits(mine[name], other[name]) for name in mine)


@rules
@dtypes
@pytest.mark.parametrize("width", [1, 3, 8, 16, 21])
def test_sparse_tables_are_the_same(both, rule, dtype, width):
    generator = np.random.default_rng(width)
    initializer = Initializer("normal", 0.1) if width % 2 else Initializer("uniform", 0.1)
    native, portable = (Sparse(width, dtype, rule, initializer, 7, one) for one in both)
    for count in (1, 63, 64, 500, 500, 200):
        keys = torch.from_numpy(generator.integers(-600, 600, count))  # some come twice
        gradients = torch.from_numpy(generator.standard_normal((count, width))).to(dtype)
        for table in (native, portable):
            table.update(keys, gradients, 0.7 if count == 500 else 1.0)
    assert same_state(native, portable)
    assert len(native) == len(portable) > 600
    everything = torch.arange(-700, 700)
    read = [torch.empty(1400, width, dtype=dtype) for _ in both]
    assert native.read(everything, read[0]) == portable.read(everything, read[1]) == 1400 - len(native)
    assert same_bits(*read)


@rules
@dtypes
def test_several_tables_in_one_call_are_as_one_after_the_other(both, rule, dtype):
    draw = torch.Generator().manual_seed(3)
    initializer = Initializer("normal", 0.1)
    each, native, portable = (
        [Sparse(5, dtype, rule, initializer, 7, one) for _ in range(3)] for one in (both[0], *both)
    )
    bounds = [0, 40, 40, 100]  # one has nothing
    for factor in (1.0, 0.7, 0.7):
        keys = torch.randint(60, (100,), generator=draw)
        gradients = torch.randn(100, 5, generator=draw, dtype=torch.float64).to(dtype)
        for table, (begin, end) in zip(each, pairwise(bounds), strict=True):
            table.update(keys[begin:end], gradients[begin:end], factor)
        for tables in (native, portable):
            Sparse.update_several(tables, bounds, keys, gradients, factor)
    read = [torch.empty(100, 5, dtype=dtype) for _ in range(3)]
    for table, (begin, end) in zip(each, pairwise(bounds), strict=True):
        table.read(keys[begin:end], read[0][begin:end])
    for tables, out in zip((native, portable), read[1:], strict=True):
        Sparse.read_several(tables, bounds, keys, out)
        assert same_bits(read[0], out)
        assert all(same_state(ours, theirs) for ours, theirs in zip(each, tables, strict=True))


@pytest.mark.parametrize("rule", [rule for rule in _RULES if RULES[rule.name].dense], ids=str)
@dtypes
def test_dense_ranges_are_the_same(both, rule, dtype):
    generator = torch.Generator().manual_seed(1)
    begun = torch.randn(70_001, generator=generator).to(dtype)
    native, portable = (Dense(len(begun), dtype, rule, one) for one in both)
    for table in (native, portable):
        table.fill(begun)
    for factor in (1.0, 0.3, 0.3):
        gradient = torch.randn(len(begun), generator=generator).to(dtype)
        for table in (native, portable):
            table.update(gradient, factor)
    assert same_state(native, portable)
    assert not torch.equal(native.values, begun)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["update", "add", "clear", "increment"]), st.integers(0, 2**32)), max_size=12),
    st.sampled_from([rule for rule in _RULES if rule.name != "ftrl"]),
)
def test_any_calls_give_the_same(calls, rule):
    native, portable = (Sparse(2, torch.float64, rule, Initializer("uniform", 1.0), 1, made(one)) for one in Choice)
    copies = [Sparse(2, torch.float64, rule, Initializer("uniform", 1.0), 1, made(one)) for one in Choice]
    for call, seed in calls:
        generator = np.random.default_rng(seed)
        keys = torch.from_numpy(generator.integers(0, 50, int(generator.integers(0, 40))))
        values = torch.from_numpy(generator.standard_normal((len(keys), 2)))
        for table, copy in zip((native, portable), copies, strict=True):
            if call == "update":
                table.update(keys, values)
            elif call == "add":
                table.add(keys, values)
            elif call == "clear":
                copy.load(table.state(since_marks=True))
                table.clear_touched()
        assert native.touched() == portable.touched()
        assert all(map(same_bits, native.state(True).values(), portable.state(True).values()))
    for table, copy in zip((native, portable), copies, strict=True):
        copy.load(table.state(since_marks=True))
        assert same_state(table, copy)  # increments add up to the whole
    assert same_state(native, portable)


@pytest.mark.parametrize("shards", [1, 2, 16, 70_000])
def test_routes_are_the_same(both, shards):
    keys = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 3000))
    for given_keys in (keys, keys[:0]):
        native, portable = (route(given_keys, shards, one) for one in both)
        assert same_bits(native.order, portable.order)
        assert same_bits(native.offsets, portable.offsets)


@dtypes
def test_unique_rows_are_the_same(both, dtype):
    generator = np.random.default_rng(0)
    keys = torch.from_numpy(generator.integers(0, 300, 2000))
    rows = torch.from_numpy(generator.standard_normal((2000, 5))).to(dtype)
    assert all(map(same_bits, unique_keys(keys, both[0]), unique_keys(keys, both[1])))
    assert all(map(same_bits, unique_rows(keys, rows, both[0]), unique_rows(keys, rows, both[1])))
