"""Operators that rearrange: views, permutations, cutting and joining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.placement.placements import Placement, Shape, Shard, merged
from paceline.placement.rules.rule import Axes, AxisRule, Call, Factors, MapRule, Strategy, rule
from paceline.placement.rules.words import labels_in, numbered, sized, whole
from paceline.placement.views import through_view

aten = torch.ops.aten


@rule(aten.detach.default, aten.alias.default)
def _identity(call: Call) -> MapRule:
    return MapRule(lambda placement, parts: placement, lambda placement, parts: placement)


# Views: the row-major index of an element stays.


def _view(call: Call, size: str | None) -> MapRule:
    before, after = call.inputs[0], _output(call)
    options = {} if size is None else {"localize": sized(size, after)}
    return MapRule(
        lambda placement, parts: through_view(before, after, placement, parts),
        lambda placement, parts: through_view(after, before, placement, parts),
        **options,
    )


@rule(aten.view.default, aten._unsafe_view.default)
def _view_to_size(call: Call) -> MapRule:
    return _view(call, "size")


@rule(aten.reshape.default)
def _reshape(call: Call) -> MapRule:
    return _view(call, "shape")


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> MapRule:
    return _view(call, None)


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: Call) -> MapRule:
    """A dimension that may be squeezed must not become 1 by being split."""
    before, view = call.inputs[0], _view(call, None)
    dims = call.arguments.get("dim", range(len(before)))
    squeezed = {d % max(len(before), 1) for d in ([dims] if isinstance(dims, int) else dims)}

    def safe(placement: Placement | None, parts: int) -> Placement | None:
        if isinstance(placement, Shard) and placement.dim in squeezed and before[placement.dim] == parts:
            return None
        return placement

    def forward(placement: Placement, parts: int) -> Placement | None:
        return None if safe(placement, parts) is None else view.forward(placement, parts)

    return MapRule(forward, lambda placement, parts: safe(view.backward(placement, parts), parts))


# Permutations: dimensions are renamed.


def _renamed(order: Sequence[int | None], places: Sequence[int | None]) -> MapRule:
    """`order`: which output dimension each input dimension becomes; `places`: the reverse; None where it is gone."""

    def carry(table: Sequence[int | None], placement: Placement) -> Placement | None:
        if not isinstance(placement, Shard):
            return placement
        dim = table[placement.dim]
        return None if dim is None else Shard(dim, placement.blocks)

    return MapRule(lambda placement, parts: carry(order, placement), lambda placement, parts: carry(places, placement))


@rule(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(call: Call) -> MapRule:
    rank = len(call.inputs[0])
    places = list(range(rank))
    if "dims" in call.arguments:
        places = [d % rank for d in call["dims"]]
    elif rank > 1:
        a, b = (call["dim0"] % rank, call["dim1"] % rank) if "dim0" in call.arguments else (0, 1)
        places[a], places[b] = b, a
    return _renamed([places.index(d) for d in range(rank)], places)


@rule(aten.select.int, aten.unbind.int)
def _select(call: Call) -> MapRule:
    rank = len(call.inputs[0])
    places = [d for d in range(rank) if d != call["dim"] % rank]
    return _renamed([places.index(d) if d in places else None for d in range(rank)], places)


@rule(aten.select_backward.default)
def _select_backward(call: Call) -> MapRule:
    rank = len(_output(call))
    places = [d for d in range(rank) if d != call["dim"] % rank]
    renamed = _renamed(places, [places.index(d) if d in places else None for d in range(rank)])
    return MapRule(renamed.forward, renamed.backward, sized("input_sizes", _output(call)))


# Cutting: an interval along a dimension survives a split whose blocks lie inside or outside of it.


def _interval(call: Call, size: int) -> tuple[int, int]:
    start, end = call["start"] or 0, size if call["end"] is None else call["end"]
    start, end = (bound + size if bound < 0 else bound for bound in (start, end))
    return min(max(start, 0), size), min(max(end, 0), size)


def _cut(dim: int, start: int, part: int, size: int, placement: Placement) -> Placement | None:
    """Placement of the elements [start, start + part) of a dimension of `size`: those of whole blocks of it."""
    if not isinstance(placement, Shard) or placement.dim != dim or part == size:
        return placement
    kept, begin = [], 0
    for block in placement.sizes(size):
        if start < begin + block and begin < start + part:
            kept.append(block)
            if begin < start or begin + block > start + part:
                return None
        begin += block
    return merged(dim, tuple(kept)) if kept else None


def _widened(dim: int, start: int, part: int, size: int, placement: Placement) -> Placement | None:
    """The reverse: blocks before and behind are as large as those of the part, or one each if that does not divide."""
    if not isinstance(placement, Shard) or placement.dim != dim or part == size:
        return placement
    if part == 0:
        return None
    blocks, rest = placement.sizes(part), size - start - part
    block = blocks[0]
    if len(set(blocks)) == 1 and start % block == 0 and rest % block == 0:
        return Shard(dim, size // block)
    return merged(dim, tuple(n for n in (start, *blocks, rest) if n))


def _localized_interval(dim: int, start: int, end: int, placement: Placement, parts: int) -> dict[str, Any]:
    split = isinstance(placement, Shard) and placement.dim == dim
    return {"start": start // parts, "end": end // parts} if split else {}


@rule(aten.slice.Tensor)
def _slice(call: Call) -> MapRule:
    shape = call.inputs[0]
    dim = call["dim"] % len(shape)
    size = shape[dim]
    start, end = _interval(call, size)
    if call["step"] != 1:
        return _all_but(dim)

    def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
        return _localized_interval(dim, start, end, strategy.inputs[0], parts)

    return MapRule(
        lambda placement, parts: _cut(dim, start, end - start, size, placement),
        lambda placement, parts: _widened(dim, start, end - start, size, placement),
        localize,
    )


@rule(aten.slice_backward.default)
def _slice_backward(call: Call) -> MapRule:
    shape = _output(call)
    dim = call["dim"] % len(shape)
    size = shape[dim]
    start, end = _interval(call, size)
    resize = sized("input_sizes", shape)
    if call["step"] != 1:
        kept = _all_but(dim)
        return MapRule(kept.forward, kept.backward, resize)

    def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
        return resize(arguments, strategy, parts) | _localized_interval(dim, start, end, strategy.inputs[0], parts)

    return MapRule(
        lambda placement, parts: _widened(dim, start, end - start, size, placement),
        lambda placement, parts: _cut(dim, start, end - start, size, placement),
        localize,
    )


def _all_but(dim: int) -> MapRule:
    def carry(placement: Placement, parts: int) -> Placement | None:
        return None if isinstance(placement, Shard) and placement.dim == dim else placement

    return MapRule(carry, carry)


@rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(call: Call) -> MapRule:
    """Pieces of a dimension. A split of each of them is a split of the whole in blocks."""
    shape = call.inputs[0]
    dim = call["dim"] % len(shape)
    sizes = [(out or ())[dim] for out in call.outputs]
    name = "split_size" if "split_size" in call.arguments else "split_sizes"

    def forward(placement: Placement, parts: int) -> Placement | None:
        if not isinstance(placement, Shard) or placement.dim != dim:
            return placement
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        pieces = {_cut(dim, start, size, shape[dim], placement) for start, size in zip(starts, sizes, strict=True)}
        return pieces.pop() if len(pieces) == 1 else None

    def backward(placement: Placement, parts: int) -> Placement | None:
        if not isinstance(placement, Shard) or placement.dim != dim:
            return placement
        if not isinstance(placement.blocks, int) or any(size % placement.blocks for size in sizes):
            return None
        return merged(dim, tuple(size // placement.blocks for size in sizes for _ in range(placement.blocks)))

    def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
        placement, given = strategy.inputs[0], arguments[name]
        if not isinstance(placement, Shard) or placement.dim != dim:
            return {}
        return {name: given // parts if isinstance(given, int) else [size // parts for size in given]}

    return MapRule(forward, backward, localize)


# Joining and repeating.


@rule(aten.cat.default)
def _cat(call: Call) -> AxisRule:
    """Tensors one after the other. A split of each of them is a split of the whole in blocks."""
    shape, everything = _output(call), tuple(range(len(call.inputs)))
    dim = call["dim"] % len(shape)
    labels: Axes = numbered(len(shape))
    sizes = [of[dim] if len(of) == len(shape) else 0 for of in call.inputs]  # old code joins empty tensors
    equal = len(set(sizes)) == 1
    part: Axes = tuple(None if d == dim and not equal else label for d, label in enumerate(labels))
    joined: Axes = tuple(
        Factors(((None, len(call.inputs)), (label, call.inputs[0][dim]))) if d == dim and equal else label
        for d, label in enumerate(part)
    )
    inputs = tuple(part if len(of) == len(shape) else whole(of) for of in call.inputs)
    extra = () if equal or 0 in sizes else (_segmented(dim, tuple(sizes)),)
    return AxisRule(inputs, (joined,), labels_in([joined]), linear=(everything,), extra=extra)


def _segmented(dim: int, sizes: tuple[int, ...]) -> Strategy:
    """Each of several tensors of unequal sizes is split, and so each of their blocks in the whole."""
    return Strategy((Shard(dim),) * len(sizes), (Shard(dim, sizes),), "segments")


@rule(aten.stack.default)
def _stack(call: Call) -> AxisRule:
    rank = len(_output(call))
    dim = call["dim"] % rank
    part = numbered(rank - 1)
    joined: Axes = (*part[:dim], None, *part[dim:])
    everything = tuple(range(len(call.inputs)))
    return AxisRule((part,) * len(call.inputs), (joined,), labels_in([part]), linear=(everything,))


@rule(aten.expand.default)
def _expand(call: Call) -> AxisRule:
    before, after = call.inputs[0], _output(call)
    labels = numbered(len(after))
    lead = len(after) - len(before)
    part: Axes = tuple(labels[lead + d] if size == after[lead + d] else None for d, size in enumerate(before))
    return AxisRule((part,), (labels,), labels_in([labels]), linear=((0,),), localize=sized("size", after))


@rule(aten.repeat.default)
def _repeat(call: Call) -> AxisRule:
    before, after, repeats = call.inputs[0], _output(call), call["repeats"]
    lead = len(after) - len(before)
    labels = numbered(len(after))
    part: Axes = tuple(labels[lead + d] for d in range(len(before)))
    joined: Axes = tuple(
        None if d < lead else Factors(((None, repeats[d]), (label, before[d - lead]))) for d, label in enumerate(labels)
    )
    return AxisRule((part,), (joined,), labels_in([part]), linear=((0,),))


# Operators that move elements along some dimensions, which stay whole.


def _moving(call: Call, dims: set[int], *, linear: bool = True) -> AxisRule:
    axes: Axes = tuple(None if d in dims else label for d, label in enumerate(numbered(len(call.inputs[0]))))
    return AxisRule((axes,), (axes,), labels_in([axes]), linear=((0,),) if linear else ())


@rule(aten.flip.default, aten.roll.default)
def _flip(call: Call) -> AxisRule:
    rank = len(call.inputs[0])
    return _moving(call, {d % rank for d in call["dims"]} or set(range(rank)))


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> AxisRule:
    rank = len(call.inputs[0])
    return _moving(call, {rank - 2, rank - 1})


@rule(aten.constant_pad_nd.default)
def _pad(call: Call) -> AxisRule:
    rank, pad = len(call.inputs[0]), call["pad"]
    padded = {rank - 1 - i // 2 for i, amount in enumerate(pad) if amount != 0}
    return _moving(call, padded, linear=call["value"] == 0)


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def _cut_scatter(call: Call) -> AxisRule:
    """A tensor with a part along a dimension replaced."""
    rank = len(call.inputs[0])
    dim = call["dim"] % rank
    axes: Axes = tuple(None if d == dim else label for d, label in enumerate(numbered(rank)))
    part = axes if len(call.inputs[1]) == rank else axes[:dim] + axes[dim + 1 :]
    return AxisRule((axes, part), (axes,), labels_in([axes]), linear=((0, 1),))


@rule(aten.unfold.default)
def _unfold(call: Call) -> MapRule:
    return _all_but(call["dimension"] % len(call.inputs[0]))


@rule(aten.unfold_backward.default)
def _unfold_backward(call: Call) -> MapRule:
    kept = _all_but(call["dim"] % len(_output(call)))
    return MapRule(kept.forward, kept.backward, sized("input_sizes", _output(call)))


@rule(aten.view_as_complex.default)
def _complex(call: Call) -> MapRule:
    return _all_but(len(call.inputs[0]) - 1)


@rule(aten.view_as_real.default)
def _real(call: Call) -> MapRule:
    return _all_but(len(call.inputs[0]))


def _output(call: Call) -> Shape:
    shape = call.outputs[0]
    assert shape is not None
    return shape
