"""Every strategy of every rule, checked against the operator itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.placement.located import coordinate
from paceline.placement.placements import PARTIAL, REPLICATE, Shard, local_shape
from paceline.placement.redistribute import redistribute
from paceline.placement.rules import AxisRule, Call, MapRule, Rule, has_rule, rule_of
from paceline.placement.rules.attention_rows import RING
from paceline.placement.rules.rule import is_pointwise, registered, unchanged
from paceline.placement.strategies import strategies
from paceline.placement.windows import window, window_sum
from tests.placement.captured import HUGGING_FACE, MODELS, calls_of
from tests.placement.drawn import bools, ints, rand
from tests.placement.instances import others
from tests.placement.oracle import Instance, faults, instance, splits, strategies_of

aten = torch.ops.aten
quick = settings(max_examples=25)

ONLY_ON_GPU = {
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._fused_rms_norm_backward.default,
}
"""No kernel for the CPU: for these only shapes are checked."""
LOCATED = {coordinate, window, window_sum}
"""Functions in a graph that know where their rank stands."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def check(target: Any, *args: Any, parts: int = 2, **kwargs: Any) -> None:
    made = instance(target, *args, **kwargs)
    assert not list(faults(made, parts))


@pytest.fixture(scope="module")
def every_call() -> list[Instance]:
    return list(others())


@pytest.mark.parametrize("name", MODELS)
def test_every_call_of_a_model_has_a_rule_and_no_wrong_strategy(name: str) -> None:
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    wrong, unknown = [], set()
    for made in calls_of(name):
        wrong += faults(made, 2)
        unknown |= set() if has_rule(made.call.target) else {str(made.call.target)}
    assert not wrong
    assert not unknown


@pytest.mark.parametrize("parts", [2, 3])
def test_no_wrong_strategy(every_call: list[Instance], parts: int) -> None:
    assert not [fault for made in every_call for fault in faults(made, parts)]


def test_every_rule_is_tried(every_call: list[Instance]) -> None:
    # `redistribute` is tried over two axes by all ranks, in tests/runtime/test_redistribution.py; what knows the rank,
    # in test_halo.py beside it. A `coordinate` reads no tensor.
    assert set(registered()) - {made.call.target for made in every_call} - {redistribute, *LOCATED} == ONLY_ON_GPU


def _tagged_pointwise() -> list[Any]:
    targets = []
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            target = getattr(packet, overload)
            if is_pointwise(target) and not target._schema.is_mutable:
                targets.append(target)
    return targets


def test_operators_tagged_pointwise_are_pointwise() -> None:
    numbers = {"Scalar": 2, "Optional[Scalar]": None, "float": 0.5, "int": 1, "bool": False, "Optional[float]": None}
    tried = 0
    for target in _tagged_pointwise():
        for draw in (lambda *shape: torch.rand(shape).double() + 0.25, lambda *shape: ints(5, *shape)):
            shapes = iter([(4, 6), (6,), (4, 1)])
            arguments = {
                a.name: draw(*next(shapes)) if str(a.type) == "Tensor" else numbers.get(str(a.type))
                for a in target._schema.arguments
                if str(a.type) in numbers or str(a.type) == "Tensor"
            }
            try:
                made = instance(target, **arguments)
            except (RuntimeError, NotImplementedError, TypeError):
                continue  # not for these dtypes, or a broadcast that it does not do
            assert not list(faults(made, 2))
            tried += 1
            break
    assert tried > 150


# Random shapes for the main families.

size = st.sampled_from([1, 2, 3, 4, 6])
shape = st.lists(size, min_size=1, max_size=4).map(tuple)
parts_of = st.sampled_from([2, 3])


@quick
@given(size, size, size, size, st.sampled_from([(1, 1), (1, 0), (0, 1), (0,), (1,), ()]), parts_of)
def test_products(b: int, i: int, k: int, j: int, bias: tuple[int, ...], parts: int) -> None:
    added = rand(*(n if kept else 1 for n, kept in zip((i, j)[2 - len(bias) :], bias, strict=True)))
    check(aten.mm.default, rand(i, k), rand(k, j), parts=parts)
    check(aten.addmm.default, added, rand(i, k), rand(k, j), parts=parts)
    check(aten.bmm.default, rand(b, i, k), rand(b, k, j), parts=parts)


@quick
@given(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=5), st.data(), parts_of)
def test_views(factors: list[int], data: st.DataObject, parts: int) -> None:
    def grouped() -> list[int]:
        dims = [1]
        for factor in factors:
            if data.draw(st.booleans()):
                dims.append(factor)
            else:
                dims[-1] *= factor
        return dims

    check(aten.view.default, rand(*grouped()), grouped(), parts=parts)
    check(aten.squeeze.default, rand(*grouped()), parts=parts)


@quick
@given(shape, st.data(), parts_of)
def test_cutting_and_joining(shape: tuple[int, ...], data: st.DataObject, parts: int) -> None:
    x, dim = rand(*shape), data.draw(st.integers(-len(shape), len(shape) - 1))
    n = shape[dim]
    start, end = data.draw(st.integers(-n, n)), data.draw(st.integers(-n, n + 2))
    cut = aten.slice.Tensor(x, dim, start, end)
    check(aten.slice.Tensor, x, dim, start, end, parts=parts)
    check(aten.slice_backward.default, cut, list(shape), dim, start, end, 1, parts=parts)
    check(aten.split.Tensor, x, data.draw(st.integers(1, n)), dim, parts=parts)
    check(aten.cat.default, [x] * data.draw(st.integers(1, 3)), dim, parts=parts)
    check(aten.cat.default, [x, cut, x], dim, parts=parts)
    check(aten.select.int, x, dim, data.draw(st.integers(-n, n - 1)), parts=parts)
    check(aten.permute.default, x, data.draw(st.permutations(range(len(shape)))), parts=parts)
    check(aten.repeat.default, x, data.draw(st.lists(st.integers(1, 2), min_size=len(shape), max_size=5)), parts=parts)


@quick
@given(shape, st.data(), parts_of)
def test_reductions_and_broadcasts(shape: tuple[int, ...], data: st.DataObject, parts: int) -> None:
    x = rand(*shape)
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    small = rand(*(1 if data.draw(st.booleans()) else n for n in shape[data.draw(st.integers(0, len(shape))) :]))
    check(aten.sum.dim_IntList, x, dims, data.draw(st.booleans()), parts=parts)
    check(aten.amax.default, x, dims, data.draw(st.booleans()), parts=parts)
    check(aten.add.Tensor, x, small, parts=parts)
    check(aten.mul.Tensor, small, x, parts=parts)
    check(aten.where.self, bools(*small.shape), x, small, parts=parts)
    check(aten.expand.default, small, list(shape), parts=parts)


@quick
@given(st.data(), parts_of)
def test_convolutions(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    groups, n, c, o = (draw(st.sampled_from([1, 2, 4, 6])) for _ in range(4))
    kernel, stride, padding = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 1))
    transposed, places = draw(st.booleans()), draw(st.sampled_from([1, 2]))
    weight = rand(c * groups, o, *[kernel] * places) if transposed else rand(o * groups, c, *[kernel] * places)
    x = rand(n, c * groups, *[draw(st.sampled_from([6, 7]))] * places)
    rest = [stride], [padding], [1], transposed, [0], groups
    out = aten.convolution.default(x, weight, rand(o * groups), *rest)
    check(aten.convolution.default, x, weight, rand(o * groups), *rest, parts=parts)
    grad = torch.randn_like(out)
    check(aten.convolution_backward.default, grad, x, weight, [o * groups], *rest, [True] * 3, parts=parts)


@quick
@given(st.data(), parts_of)
def test_attention(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    b, groups, repeats, columns = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    causal, rows = draw(st.booleans()), draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    columns = draw(st.sampled_from([rows, columns])) if causal else columns
    q, k, v = rand(b, groups * repeats, rows, 4), rand(b, groups, columns, 4), rand(b, groups, columns, 4)
    full = (b, groups * repeats, rows, columns)
    mask = rand(*(n if i > 1 or draw(st.booleans()) else 1 for i, n in enumerate(full)))
    options = {} if causal or draw(st.booleans()) else {"attn_mask": mask}
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    check(forward, q, k, v, 0.0, causal, parts=parts, **options)
    saved = forward(q, k, v, 0.0, causal, **options)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    check(backward, torch.randn_like(q), q, k, v, *saved, 0.0, causal, parts=parts, **options)


@quick
@given(st.lists(size, min_size=2, max_size=4), st.data(), parts_of)
def test_indices(shape: list[int], data: st.DataObject, parts: int) -> None:
    x = rand(*shape)
    indexed = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    places = data.draw(st.sampled_from([(4,), (6, 1), (2, 3)]))
    indices = [ints(n, *places) if d in indexed else None for d, n in enumerate(shape)]
    check(aten.index.Tensor, x, indices, parts=parts)
    values = torch.randn_like(aten.index.Tensor(x, indices))
    check(aten.index_put.default, x, indices, values, True, parts=parts)
    dim = data.draw(st.integers(0, len(shape) - 1))
    at = ints(shape[dim], *[n if d != dim else 6 for d, n in enumerate(shape)])
    check(aten.gather.default, x, dim, at, parts=parts)
    check(aten.scatter_add.default, x, dim, at, rand(*at.shape), parts=parts)


# What the oracle and the strategies themselves promise.


def _with(**changes: Any) -> Callable[[Rule], Rule]:
    return lambda rule: replace(rule, **changes)


WRONG: dict[str, tuple[Callable[[], Instance], Callable[[Rule], Rule]]] = {
    "a bias added on every rank": (
        lambda: instance(aten.addmm.default, rand(8), rand(4, 6), rand(6, 8)),
        _with(pinned={}),
    ),
    "a sum taken for whole": (
        lambda: instance(aten.mm.default, rand(4, 6), rand(6, 8)),
        _with(results={("k", 0): REPLICATE}),
    ),
    "a normalised axis that is split": (
        lambda: instance(aten._softmax.default, rand(4, 6), 1, False),
        _with(inputs=(("n", "c"),), outputs=(("n", "c"),), split=frozenset("nc")),
    ),
    "axes exchanged": (
        lambda: instance(aten.bmm.default, rand(4, 4, 4), rand(4, 4, 4)),
        _with(inputs=(tuple("bik"), tuple("bjk"))),
    ),
    "a function taken for linear": (lambda: instance(aten.relu.default, rand(4, 6)), _with(linear=((0,),))),
    "groups cut through": (
        lambda: instance(aten.convolution.default, rand(2, 8, 6), rand(8, 4, 3), None, [1], [1], [1], False, [0], 2),
        _with(inputs=(("n", "c", None), ("c", None, None)), outputs=(("n", "c", None),), split=frozenset("c")),
    ),
    "sizes left as they were": (
        lambda: instance(aten.slice_backward.default, rand(4, 2), [4, 6], 1, 2, 4, 1),
        _with(localize=unchanged),
    ),
    "a view that keeps the dimension": (
        lambda: instance(aten.view.default, rand(4, 6), [6, 4]),
        _with(forward=lambda placement, parts: placement, backward=lambda placement, parts: placement),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_oracle_finds(name: str) -> None:
    make, spoil = WRONG[name]
    made = make()
    right = rule_of(made.call)
    assert not list(faults(made, 2, right))
    assert list(faults(made, 2, spoil(right)))


def test_the_replicated_strategy_comes_first_and_order_is_fixed(every_call: list[Instance]) -> None:
    for made in every_call[::5]:
        call, rule = made.call, rule_of(made.call)
        shards = [splits(shape, 2) for shape in (*call.inputs, *call.outputs)]
        found = strategies(call, rule, shards, 2)
        assert set(found[0].inputs + found[0].outputs) <= {REPLICATE}
        assert found == strategies(call, rule, [list(reversed(s)) for s in shards], 2)
        assert len(set(found)) == len(found)


def test_only_allowed_splits_are_used() -> None:
    call = instance(aten.mm.default, rand(4, 6), rand(6, 8)).call
    only_rows = [[Shard(0)], [], [Shard(0)]]
    found = strategies(call, rule_of(call), only_rows, 2)
    assert [s.label for s in found] == [None, "i"]
    assert found[1].inputs == (Shard(0), REPLICATE) and found[1].outputs == (Shard(0),)


def test_booleans_are_never_partial_sums_and_rounding_ends_one() -> None:
    for target, args in ((aten.clone.default, (bools(4, 6),)), (aten.detach.default, (bools(4, 6),))):
        call = instance(target, *args).call
        assert all(PARTIAL not in s.inputs for s in strategies_of(call, rule_of(call), 2))
    rounded = instance(aten._to_copy.default, rand(4, 6), dtype=torch.int64).call
    assert all(PARTIAL not in s.inputs for s in strategies_of(rounded, rule_of(rounded), 2))
    counted = instance(aten.sum.default, bools(4, 6)).call
    assert any(PARTIAL in s.outputs for s in strategies_of(counted, rule_of(counted), 2))


def test_fused_projections_split_without_communication() -> None:
    call = instance(aten.split.Tensor, rand(4, 24), 8, 1).call
    assert any(
        s.inputs == (Shard(1, 3),) and s.outputs == (Shard(1),) * 3 for s in strategies_of(call, rule_of(call), 2)
    )
    call = instance(aten.cat.default, [rand(4, 8)] * 3, 1).call
    assert any(
        s.inputs == (Shard(1),) * 3 and s.outputs == (Shard(1, 3),) for s in strategies_of(call, rule_of(call), 2)
    )


def test_an_operator_without_a_rule_is_replicated() -> None:
    call = instance(aten.linalg_inv_ex.default, torch.eye(4).double()).call
    assert not has_rule(call.target)
    assert [s.label for s in strategies_of(call, rule_of(call), 2)] == [None]


# Kernels that only GPUs have: that their results have the shapes which the strategies promise.


def _gpu_calls() -> list[Instance]:
    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    found = []
    for groups, causal in product((4, 2), (True, False)):
        q, k = meta(2, 4, 8, 16), meta(2, groups, 8, 16)
        out, saved = meta(2, 4, 8, 16), meta(2, 4, 8)
        seed = torch.empty((), dtype=torch.int64, device="meta")
        found += [
            instance(aten._scaled_dot_product_efficient_attention.default, q, k, k, None, True, 0.0, causal),
            instance(aten._scaled_dot_product_flash_attention.default, q, k, k, 0.0, causal),
            instance(aten._scaled_dot_product_cudnn_attention.default, q, k, k, None, True, 0.0, causal),
            instance(
                aten._scaled_dot_product_flash_attention_backward.default,
                *(out, q, k, k, out, saved, seed, seed, 8, 8, 0.0, causal, seed, seed),
            ),
            instance(
                aten._scaled_dot_product_cudnn_attention_backward.default,
                *(out, q, k, k, out, meta(2, 4, 8, 1), seed, seed, meta(2, 1, 8, 8), seed, seed, 8, 8, 0.0, causal),
            ),
        ]
        if groups == 4:  # that kernel knows no grouped queries
            bias, rows = meta(2, 4, 8, 8), meta(2, 4, 32)
            rest = seed, seed, 0.0, [True] * 4, causal
            backward = aten._scaled_dot_product_efficient_attention_backward.default
            found.append(instance(backward, out, q, k, k, bias, out, rows, *rest))
    x, w = meta(4, 6, 8), meta(8)
    found.append(instance(aten._fused_rms_norm_backward.default, x, x, [8], meta(4, 6, 1), w, [True, True]))
    return found


def test_kernels_for_gpus_keep_their_promises_of_shape() -> None:
    calls = _gpu_calls()
    assert {made.call.target for made in calls} == ONLY_ON_GPU
    for made in calls:
        call, rule = made.call, rule_of(made.call)
        found = strategies_of(call, rule, 2)
        assert {"b", "g"} <= {s.label for s in found} or "rms" in str(call.target)
        for strategy in found:
            local = [
                torch.empty(local_shape(s, p, 2), device="meta", dtype=t.dtype)
                for s, p, t in zip(call.inputs, strategy.inputs, made.tensors, strict=True)
            ]
            mine = instance(call.target, *_filled(call, local))
            for shape, placement, got in zip(call.outputs, strategy.outputs, mine.call.outputs, strict=True):
                assert shape is None or got == local_shape(shape, placement, 2)


def _filled(call: Call, tensors: list[torch.Tensor]) -> list[Any]:
    index = iter(tensors)
    positional = [a for a in call.target._schema.arguments if not a.kwarg_only]
    is_tensor = {"Tensor", "Optional[Tensor]"}
    return [
        next(index) if str(a.type) in is_tensor and call.arguments[a.name] is not None else call.arguments[a.name]
        for a in positional
    ]


def test_attention_on_gpus_splits_as_on_the_cpu() -> None:
    q, k = rand(2, 4, 8, 16), rand(2, 2, 8, 16)
    on_cpu = instance(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, k).call
    on_gpu = instance(aten._scaled_dot_product_flash_attention.default, *(t.to("meta") for t in (q, k, k))).call
    ours, theirs = (
        {(s.label, s.inputs, s.outputs[:2]) for s in strategies_of(c, rule_of(c), 2) if s.label != RING}
        for c in (on_cpu, on_gpu)
    )
    assert ours == theirs


def test_rules_are_of_the_two_kinds(every_call: list[Instance]) -> None:
    for made in every_call:
        rule = rule_of(made.call)
        if isinstance(rule, AxisRule):
            assert [len(a) for a in rule.inputs] == [len(s) for s in made.call.inputs], made.call.target
        else:
            assert isinstance(rule, MapRule) and len(made.call.inputs) == 1
