"""Strategies that exchange halos, on random windows, against the operator itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.placement.rules import AxisRule, MapRule, rule_of
from tests.placement.drawn import ints, rand
from tests.placement.oracle import faults, instance, strategies_of

aten = torch.ops.aten
quick = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    database=None,
)
parts_of = st.sampled_from([2, 3, 4])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def check(target: Any, *args: Any, parts: int, dim: int | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """Try every strategy; there must be one that splits `dim` of the result."""
    made = instance(target, *args, **kwargs)
    rule = rule_of(made.call)
    if dim is not None:
        assert f"rows {dim}" in {strategy.label for strategy in strategies_of(made.call, rule, parts)}
    assert not list(faults(made, parts, rule))
    return made.results


def divisible(*sizes: int, parts: int) -> None:
    assume(all(size > 0 and size % parts == 0 for size in sizes))


@quick
@given(st.data(), parts_of)
def test_convolutions(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    groups, kernel, stride, dilation = (draw(st.integers(1, most)) for most in (2, 5, 4, 3))
    padding, size = draw(st.integers(0, 3)), parts * draw(st.integers(1, 5))
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    divisible(out, parts=parts)
    assume((kernel, padding) != (1, 0) and (kernel, padding, dilation) != (stride, 0, 1))  # those need no exchange
    x, weight, bias = rand(2, 2 * groups, size, 3), rand(3 * groups, 2, kernel, 2), rand(3 * groups)
    rest = [stride, 1], [padding, 0], [dilation, 1], False, [0, 0], groups
    (found,) = check(aten.convolution.default, x, weight, bias, *rest, parts=parts, dim=2)
    grad, backward = torch.randn_like(found), aten.convolution_backward.default
    mask = [draw(st.booleans()), draw(st.booleans()), draw(st.booleans())]
    assume(any(mask))
    check(backward, grad, x, weight, [len(bias)], *rest, mask, parts=parts, dim=2)


@quick
@given(st.data(), parts_of)
def test_transposed_convolutions(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    groups, kernel, stride, dilation = (draw(st.integers(1, most)) for most in (2, 5, 3, 3))
    padding, size = draw(st.integers(0, 2)), parts * draw(st.integers(1, 4))
    more = draw(st.integers(0, max(stride, dilation) - 1))
    out = (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 + more
    divisible(out, parts=parts)
    x, weight, bias = rand(2, 2 * groups, size, 3), rand(2 * groups, 3, kernel, 2), rand(3 * groups)
    rest = [stride, 1], [padding, 0], [dilation, 1], True, [more, 0], groups
    (found,) = check(aten.convolution.default, x, weight, bias, *rest, parts=parts, dim=2)
    grad, backward = torch.randn_like(found), aten.convolution_backward.default
    mask = [draw(st.booleans()), draw(st.booleans()), draw(st.booleans())]
    assume(any(mask))
    check(backward, grad, x, weight, [len(bias)], *rest, mask, parts=parts, dim=2)


@pytest.mark.parametrize("places", [1, 2, 3])
def test_the_last_of_several_places(places: int) -> None:
    for transposed in (False, True):
        x, weight = rand(2, 2, *[3] * (places - 1), 8), rand(2, 2, *[3] * places)
        rest = [1], [1], [1], transposed, [0], 1
        (found,) = check(aten.convolution.default, x, weight, None, *rest, parts=2, dim=1 + places)
        check(
            aten.convolution_backward.default,
            found,
            x,
            weight,
            None,
            *rest,
            [True, True, False],
            parts=2,
            dim=1 + places,
        )


@quick
@given(st.data(), parts_of)
def test_maxima(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    kernel, stride, dilation = (draw(st.integers(1, most)) for most in (4, 4, 2))
    padding, size = draw(st.integers(0, kernel // 2)), parts * draw(st.integers(1, 5))
    windows = [kernel, 2], [stride, 1], [padding, 1], [dilation, 1], draw(st.booleans())
    dim, shape = draw(st.sampled_from([2, 3])), [2, 2, size, 5]
    if dim == 3:
        shape[2:], windows = [5, size], (*(pair[::-1] for pair in windows[:4]), windows[4])
    x = rand(*shape) if draw(st.booleans()) else ints(3, *shape).double()  # with equal elements the first one counts
    if draw(st.booleans()):
        x[torch.rand(shape) < 0.5] = -torch.inf  # windows may see nothing else
    forward, backward = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
    assume(size + 2 * padding > dilation * (kernel - 1))
    found, indices = forward(x, *windows)
    divisible(found.shape[dim], parts=parts)
    check(forward, x, *windows, parts=parts, dim=dim)
    check(backward, torch.randn_like(found), x, *windows, indices, parts=parts, dim=dim)


@quick
@given(st.data(), parts_of)
def test_averages(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    kernel, stride = (draw(st.integers(1, most)) for most in (4, 4))
    padding, size = draw(st.integers(0, kernel // 2)), parts * draw(st.integers(1, 5))
    divisor = draw(st.sampled_from([None, 5]))
    windows = [kernel, 2], [stride, 1], [padding, 1], draw(st.booleans()), draw(st.booleans()), divisor
    x = rand(2, 2, size, 5)
    assume(size + 2 * padding >= kernel)
    found = aten.avg_pool2d.default(x, *windows)
    divisible(found.shape[2], parts=parts)
    dim = 2 if divisor or (padding == 0 and not windows[3]) else None
    check(aten.avg_pool2d.default, x, *windows, parts=parts, dim=dim)
    check(aten.avg_pool2d_backward.default, torch.randn_like(found), x, *windows, parts=parts, dim=dim)


def test_pools_of_volumes() -> None:
    x, pool = rand(2, 2, 4, 4, 4), ([3, 3, 3], [1, 1, 1], [1, 1, 1])
    for dim in (2, 3, 4):
        (found,) = check(aten.avg_pool3d.default, x, *pool, parts=2, dim=dim)
        check(aten.avg_pool3d_backward.default, found, x, *pool, False, True, None, parts=2, dim=dim)
        found, indices = check(aten.max_pool3d_with_indices.default, x, *pool, parts=2, dim=dim)
        backward = aten.max_pool3d_with_indices_backward.default
        check(backward, found, x, *pool, [1, 1, 1], False, indices, parts=2, dim=dim)


@quick
@given(st.integers(1, 4), st.integers(1, 4), parts_of)
def test_adaptive_pools(rows: int, out: int, parts: int) -> None:
    """Sizes need not divide each other."""
    x, sizes = rand(2, 3, parts * rows, 5), [parts * out, 2]
    (found,) = check(aten._adaptive_avg_pool2d.default, x, sizes, parts=parts)
    check(aten._adaptive_avg_pool2d_backward.default, torch.randn_like(found), x, parts=parts)
    found, indices = check(aten.adaptive_max_pool2d.default, x, sizes, parts=parts, dim=2)
    check(aten.adaptive_max_pool2d_backward.default, torch.randn_like(found), x, indices, parts=parts, dim=2)
    found, indices = check(aten.adaptive_max_pool2d.default, x.transpose(2, 3), sizes[::-1], parts=parts, dim=3)


@quick
@given(st.data(), parts_of)
def test_resizing(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    size, out, aligned = parts * draw(st.integers(1, 6)), parts * draw(st.integers(1, 12)), draw(st.booleans())
    scales = [out / size if draw(st.booleans()) else None, None]
    x, sizes = rand(2, 3, size, 4), [out, 8]
    grad = rand(2, 3, *sizes)
    for name in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
        check(getattr(aten, name).default, x, sizes, *scales, parts=parts)
        check(getattr(aten, f"{name}_backward").default, grad, sizes, list(x.shape), *scales, parts=parts)
    for name in ("upsample_bilinear2d", "upsample_bicubic2d"):
        fits = out % size == 0 and size >= 4 and not aligned
        dim = 2 if fits else None
        check(getattr(aten, name).default, x, sizes, aligned, *scales, parts=parts, dim=dim)
        backward = getattr(aten, f"{name}_backward").default
        check(backward, grad, sizes, list(x.shape), aligned, *scales, parts=parts, dim=dim)


def test_resizing_of_lines_and_volumes() -> None:
    line, cube = rand(2, 3, 8), rand(2, 3, 4, 4, 4)
    check(aten.upsample_linear1d.default, line, [16], False, parts=2, dim=2)
    check(aten.upsample_linear1d_backward.default, rand(2, 3, 16), [16], [2, 3, 8], False, parts=2, dim=2)
    for dim in (2, 3, 4):
        check(aten.upsample_trilinear3d.default, cube, [8, 8, 8], False, parts=2, dim=dim)
        backward = aten.upsample_trilinear3d_backward.default
        check(backward, rand(2, 3, 8, 8, 8), [8, 8, 8], [2, 3, 4, 4, 4], False, parts=2, dim=dim)
    for name, shape in (("1d", (8,)), ("3d", (4, 4, 4))):
        for kind in ("upsample_nearest", "_upsample_nearest_exact"):
            out = [2 * n for n in shape]
            check(getattr(aten, kind + name).default, rand(2, 3, *shape), out, parts=2)
            check(getattr(aten, f"{kind}{name}_backward").default, rand(2, 3, *out), out, [2, 3, *shape], parts=2)


@quick
@given(st.data(), parts_of)
def test_paddings(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    size = parts * draw(st.integers(1, 4))
    before, behind, other = (draw(st.integers(0, most)) for most in (min(size - 1, 4), min(size - 1, 4), 2))
    assume(before or behind)
    divisible(size + before + behind, parts=parts)
    x, amounts = rand(2, 3, size, 3), [other, 0, before, behind]
    for name in ("reflection_pad2d", "replication_pad2d"):
        (found,) = check(getattr(aten, name).default, x, amounts, parts=parts, dim=2)
        check(getattr(aten, f"{name}_backward").default, torch.randn_like(found), x, amounts, parts=parts, dim=2)
    check(aten.constant_pad_nd.default, x, amounts, draw(st.sampled_from([0, 1.5, -torch.inf])), parts=parts, dim=2)
    check(aten.constant_pad_nd.default, ints(5, 2, size), [before, behind], -100, parts=parts, dim=1)


def test_paddings_of_lines_and_volumes_and_crops() -> None:
    for name in ("reflection_pad", "replication_pad"):
        for places, x in ((1, rand(2, 8)), (3, rand(2, 3, 3, 8))):
            pad = getattr(aten, f"{name}{places}d").default
            amounts = [2, 4, *[1, 1] * (places - 1)]
            (found,) = check(pad, x, amounts, parts=2, dim=places)
            backward = getattr(aten, f"{name}{places}d_backward").default
            check(backward, torch.randn_like(found), x, amounts, parts=2, dim=places)
    check(aten.constant_pad_nd.default, rand(2, 8), [-1, 1], parts=2, dim=1)  # a shift
    check(aten.constant_pad_nd.default, rand(2, 12, 3), [0, 0, -3, -1], parts=4, dim=1)


@quick
@given(st.data(), parts_of)
def test_shifts(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    x, shifts = rand(2, parts * draw(st.integers(1, 4)), 6), st.integers(-9, 9)
    check(aten.roll.default, x, [draw(shifts)], [1], parts=parts, dim=1)
    check(aten.roll.default, x, [draw(shifts), draw(shifts)], [-2, 2], parts=parts, dim=1)
    check(aten.roll.default, x, [draw(shifts), draw(shifts)], [1, 1], parts=parts)
    check(aten.flip.default, x, draw(st.sampled_from([[1], [0, 1], [-1, -2]])), parts=parts, dim=1)


@quick
@given(st.data(), parts_of)
def test_slices_across_the_cut(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    size, step = parts * draw(st.integers(1, 12)), draw(st.integers(1, 3))
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start, size))
    x = rand(2, size, 3)
    (found,) = check(aten.slice.Tensor, x, 1, start, stop, step, parts=parts)
    check(aten.slice_backward.default, torch.randn_like(found), list(x.shape), 1, start, stop, step, parts=parts)


def test_which_slices_are_free() -> None:
    def is_free(x: Tensor, *cut: int) -> bool:
        return isinstance(rule_of(instance(aten.slice.Tensor, x, 1, *cut).call), MapRule)

    assert is_free(rand(2, 24, 3), 8, 16)  # a part of a fused projection
    assert is_free(rand(2, 8, 3), 1, 8)  # seven elements are split by nobody
    assert is_free(rand(2, 512), 0, 6)  # a table of positions
    assert is_free(rand(2, 8, 3), 1, 8, 2)  # every other one
    for cut in ((1, 33), (2, 34), (0, 56), (1, 33, 2)):
        x = rand(2, 60, 3)
        assert not is_free(x, *cut)
        check(aten.slice.Tensor, x, 1, *cut, parts=2, dim=1)


@quick
@given(st.data(), parts_of)
def test_unfolding(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    size, width, step = parts * draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    assume(size >= width)
    divisible((size - width) // step + 1, parts=parts)
    x = rand(2, size, 3)
    (found,) = check(aten.unfold.default, x, 1, width, step, parts=parts, dim=1)
    check(aten.unfold_backward.default, torch.randn_like(found), list(x.shape), 1, width, step, parts=parts, dim=1)


@quick
@given(st.data(), parts_of)
def test_patches_as_columns(data: st.DataObject, parts: int) -> None:
    draw = data.draw
    kernel, stride, dilation, padding = (draw(st.integers(1, most)) for most in (3, 3, 2, 2))
    size = parts * draw(st.integers(1, 4))
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    divisible(out, parts=parts)
    dim = draw(st.integers(0, 1))
    shape = [2, size, 4] if dim == 0 else [2, 4, size]
    shape = [3, *shape] if draw(st.booleans()) else shape
    windows = [[kernel, 2], [dilation, 1], [padding, 1], [stride, 2]]
    windows = windows if dim == 0 else [pair[::-1] for pair in windows]
    x = rand(*shape)
    (columns,) = check(aten.im2col.default, x, *windows, parts=parts)
    check(aten.col2im.default, torch.randn_like(columns), shape[-2:], *windows, parts=parts)


def test_patches_as_columns_are_split_along_both_places() -> None:
    windows = [3, 3], [1, 1], [1, 1], [1, 1]
    for dim in (2, 3):
        (columns,) = check(aten.im2col.default, rand(2, 3, 8, 4), *windows, parts=2, dim=dim)
        check(aten.col2im.default, columns, [8, 4], *windows, parts=2, dim=dim)


def test_patches_as_channels() -> None:
    for shape in ((2, 12, 4, 6), (12, 4, 6)):
        (spread,) = check(aten.pixel_shuffle.default, rand(*shape), 2, parts=2)
        check(aten.pixel_unshuffle.default, spread, 2, parts=2)


def test_what_is_near_costs_less_than_what_is_far() -> None:
    def sent(target: Any, *args: Any) -> int:
        rule = rule_of(instance(target, *args).call)
        assert isinstance(rule, AxisRule)
        return sum(move.nbytes for move in rule.written["rows 2"].moves)

    x = rand(2, 4, 16, 16)
    small, large = (
        sent(aten.convolution.default, x, rand(4, 4, k, k), None, [1], [k // 2], [1], False, [0], 1) for k in (3, 7)
    )
    assert 0 < small < large < x.nbytes
    assert sent(aten.convolution.default, x, rand(4, 4, 1, 1), None, [2], [0], [1], False, [0], 1) == 0
