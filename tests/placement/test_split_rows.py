"""Operators whose indexed or normalised dimension is split: rows of an embedding, classes of a cross-entropy, time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.placement.placements import MAXIMUM, PARTIAL, Shard
from paceline.placement.rules import rule_of
from paceline.program import indices, softmax  # noqa: F401  (registers the operators)
from tests.placement.drawn import ints, rand
from tests.placement.oracle import faults, instance, strategies_of

aten = torch.ops.aten
ours = torch.ops.paceline
quick = settings(max_examples=12)
size = st.sampled_from([1, 2, 3])
NONE, MEAN, SUM = 0, 1, 2


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def check(target: Any, *args: Any, split: int | None = None, parts: int = 2, **kwargs: Any) -> None:
    """Try every strategy; there is one that splits tensor 0, or the result where there is none, along `split`."""
    made = instance(target, *args, **kwargs)
    assert not list(faults(made, parts))
    if split is not None:
        found = strategies_of(made.call, rule_of(made.call), parts)
        assert any(Shard(split) in (*s.inputs[:1], *s.outputs) for s in found)


def masked(data: st.DataObject, *shape: int) -> Tensor:
    """Numbers far from zero, some of them, whole rows or whole pieces of rows minus infinity."""
    x = rand(*shape) * 3 + data.draw(st.sampled_from([0.0, 300.0, -300.0]))
    x[torch.rand(shape) < data.draw(st.sampled_from([0.0, 0.3]))] = -torch.inf
    for dim, n in enumerate(shape):
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, n - 1))
            x.narrow(dim, start, n - start)[:1] = -torch.inf
    return x


@quick
@given(st.lists(size, max_size=2), st.lists(size, max_size=1), size, st.data(), st.sampled_from([2, 3]))
def test_softmax(before: list[int], after: list[int], each: int, data: st.DataObject, parts: int) -> None:
    x, dim = masked(data, *before, each * parts, *after), len(before)
    check(aten._safe_softmax.default, x, dim, parts=parts, split=dim)
    check(aten.logsumexp.default, x, [dim], data.draw(st.booleans()), parts=parts, split=dim)
    check(aten.amax.default, x, [dim], data.draw(st.booleans()), parts=parts, split=dim)
    for name in ("_softmax", "_log_softmax"):
        forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward_data").default
        check(forward, x, dim - x.ndim, False, parts=parts, split=dim)
        result = forward(x, dim, False).nan_to_num(0.0)
        check(backward, torch.randn_like(x), result, dim, x.dtype, parts=parts, split=dim)


def test_infinities_are_those_of_the_whole() -> None:
    x = torch.tensor(
        [[torch.inf, 1, 2, 3], [torch.inf, torch.inf, -torch.inf, 0], [-torch.inf] * 4, [1, torch.nan, 2, 3]]
    )
    for target in (aten._softmax.default, aten._log_softmax.default):
        check(target, x.double(), 1, False, split=1)
    check(aten.logsumexp.default, x.double(), [1], split=1)
    check(aten._safe_softmax.default, x.double(), 1, split=1)


@quick
@given(size, size, st.lists(size, min_size=2, max_size=2), st.data(), st.sampled_from([2, 3]))
def test_losses(n: int, each: int, places: list[int], data: st.DataObject, parts: int) -> None:
    classes = each * parts
    ignored = data.draw(st.sampled_from([-100, 0, classes - 1, classes + 3, -1]))
    weight = data.draw(st.sampled_from([None, torch.rand(classes).double()]))
    for name, shape in (("nll_loss", ()), ("nll_loss2d", tuple(places))):
        forward, backward = getattr(aten, f"{name}_forward").default, getattr(aten, f"{name}_backward").default
        target = ints(classes, n, *shape)
        target[torch.rand(target.shape) < 0.3] = ignored
        x = rand(n, classes, *shape)
        for reduction in (NONE, MEAN, SUM):
            loss, total = forward(x, target, weight, reduction, ignored)
            splits = None if reduction == MEAN else 1
            check(forward, x, target, weight, reduction, ignored, parts=parts, split=splits)
            arguments = torch.randn_like(loss), x, target, weight, reduction, ignored, total
            check(backward, *arguments, parts=parts, split=1)
    check(aten.nll_loss_forward.default, rand(classes), ints(classes), weight, SUM, ignored, parts=parts, split=0)


@quick
@given(size, st.lists(size, max_size=3), st.data(), st.sampled_from([2, 3]))
def test_embeddings(each: int, places: list[int], data: st.DataObject, parts: int) -> None:
    rows = each * parts
    padding, ids = data.draw(st.sampled_from([-1, 0, rows - 1])), ints(rows, *places)
    check(aten.embedding.default, rand(rows, 4), ids, padding, parts=parts, split=0)
    check(aten.embedding_dense_backward.default, rand(*places, 4), ids, rows, padding, False, parts=parts, split=0)


@quick
@given(st.lists(size, max_size=2), st.lists(size, max_size=2), size, st.data(), st.sampled_from([2, 3]))
def test_reading_and_writing(before: list[int], after: list[int], each: int, data: st.DataObject, parts: int) -> None:
    dim, rows = len(before), each * parts
    x, at = rand(*before, rows, *after), ints(rows, 5)
    each_place = ints(rows, *before, 4, *after)
    check(aten.gather.default, x, dim, each_place, parts=parts, split=dim)
    check(aten.index_select.default, x, dim, at, parts=parts, split=dim)
    check(aten.scatter_add.default, x, dim, each_place, rand(*each_place.shape), parts=parts, split=dim)
    check(aten.index_add.default, x, dim, at, rand(*before, 5, *after), alpha=3, parts=parts, split=dim)
    ordered = torch.rand(x.shape).argsort(dim).narrow(dim, 0, data.draw(st.integers(1, rows)))
    check(aten.scatter.src, x, dim, ordered, rand(*ordered.shape), parts=parts, split=dim)
    check(aten.scatter.value, x, dim, ordered, 2.0, parts=parts, split=dim)
    reduction = data.draw(st.sampled_from(["amax", "prod", "mean"]))
    arguments = x, dim, each_place, rand(*each_place.shape), reduction
    check(aten.scatter_reduce.two, *arguments, include_self=data.draw(st.booleans()), parts=parts, split=dim)


@quick
@given(st.lists(size, min_size=1, max_size=3), st.data(), st.sampled_from([2, 3]))
def test_advanced_indices(sizes: list[int], data: st.DataObject, parts: int) -> None:
    shape = [each * parts for each in sizes]
    x, places = rand(*shape), data.draw(st.sampled_from([(), (3,), (2, 3)]))
    indexed = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    at = [
        ints(2 * n, *places[data.draw(st.integers(0, len(places))) :]) - n if d in indexed else None
        for d, n in enumerate(shape)
    ]
    result = aten.index.Tensor(x, at)
    values = rand(*result.shape[data.draw(st.integers(0, result.ndim)) :])
    for dim in indexed:
        check(aten.index.Tensor, x, at, parts=parts, split=dim)
        check(aten.index_put.default, x, at, values, True, parts=parts, split=dim)
        check(aten.index_put.default, x, at, torch.tensor(2.0).double(), False, parts=parts, split=dim)


@quick
@given(st.lists(size, max_size=2), st.lists(size, max_size=2), size, st.sampled_from([2, 3]))
def test_running_sums(before: list[int], after: list[int], each: int, parts: int) -> None:
    dim, shape = len(before), (*before, each * parts, *after)
    check(aten.cumsum.default, rand(*shape), dim, parts=parts, split=dim)
    check(aten.cumsum.default, ints(9, *shape).int(), dim - len(shape), parts=parts, split=dim)
    check(aten.cumsum.default, ints(2, *shape).bool(), dim, dtype=torch.float64, parts=parts, split=dim)


def test_only_contiguous_pieces_of_rows_are_known_by_their_number() -> None:
    call = instance(aten.embedding.default, rand(8, 4), ints(8, 3)).call
    found = strategies_of(call, rule_of(call), 2)
    assert {s.inputs[0] for s in found if PARTIAL in s.outputs and s.label == "rows"} == {Shard(0)}


def test_maxima_of_parts_are_maxima_whatever_the_blocks() -> None:
    call = instance(aten.amax.default, rand(4, 8), [1]).call
    found = {s.inputs[0] for s in strategies_of(call, rule_of(call), 2) if s.outputs == (MAXIMUM,)}
    assert found >= {Shard(1), Shard(1, 2), Shard(1, 4)}


def test_an_index_that_means_no_row_stays_wrong() -> None:
    index = torch.tensor([0, 3, 4, 7, 8, -1, -8, -9])
    local = [ours.local_index(index, torch.tensor(rank), 4, 8, -50) for rank in (0, 1)]
    assert local[0].tolist() == [0, 3, -50, -50, 8, -1, -8, -9]
    assert local[1].tolist() == [-50, -50, 0, 3, 8, -1, -8, -9]
    wrapped = ours.local_index(index, torch.tensor(1), 4, 8, -50, True)
    assert wrapped.tolist() == [-50, -50, 0, 3, 8, 3, -50, -9]
    for read in (lambda: aten.embedding.default(rand(4, 2), local[0]), lambda: rand(4)[wrapped]):
        with pytest.raises(IndexError):
            read()
