"""Operators that rearrange: views, permutations, joining and repeating."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.placement.placements import Placement, Shard
from paceline.placement.rules.rule import Axes, AxisRule, Call, Factors, MapRule, Strategy, rule
from paceline.placement.rules.words import all_but, labels_in, numbered, output_of, sized, uncut, whole
from paceline.placement.views import through_view

aten = torch.ops.aten


@rule(aten.detach.default, aten.alias.default)
def _identity(call: Call) -> MapRule:
    return MapRule(lambda placement, parts: placement, lambda placement, parts: placement)


# Views: the row-major index of an element stays.


def _view(call: Call, size: str | None) -> MapRule:
    before, after = call.inputs[0], output_of(call)
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
    rank = len(output_of(call))
    places = [d for d in range(rank) if d != call["dim"] % rank]
    renamed = _renamed(places, [places.index(d) if d in places else None for d in range(rank)])
    return MapRule(renamed.forward, renamed.backward, sized("input_sizes", output_of(call)))


# Joining and repeating.


@rule(aten.cat.default)
def _cat(call: Call) -> AxisRule:
    """Tensors one after the other. A split of each of them is a split of the whole in blocks."""
    shape, everything = output_of(call), tuple(range(len(call.inputs)))
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
    rank = len(output_of(call))
    dim = call["dim"] % rank
    part = numbered(rank - 1)
    joined: Axes = (*part[:dim], None, *part[dim:])
    everything = tuple(range(len(call.inputs)))
    return AxisRule((part,) * len(call.inputs), (joined,), labels_in([part]), linear=(everything,))


@rule(aten.expand.default)
def _expand(call: Call) -> AxisRule:
    before, after = call.inputs[0], output_of(call)
    labels = numbered(len(after))
    lead = len(after) - len(before)
    part: Axes = tuple(labels[lead + d] if size == after[lead + d] else None for d, size in enumerate(before))
    return AxisRule((part,), (labels,), labels_in([labels]), linear=((0,),), localize=sized("size", after))


@rule(aten.repeat.default)
def _repeat(call: Call) -> AxisRule:
    before, after, repeats = call.inputs[0], output_of(call), call["repeats"]
    lead = len(after) - len(before)
    labels = numbered(len(after))
    part: Axes = tuple(labels[lead + d] for d in range(len(before)))
    joined: Axes = tuple(
        None if d < lead else Factors(((None, repeats[d]), (label, before[d - lead]))) for d, label in enumerate(labels)
    )
    return AxisRule((part,), (joined,), labels_in([part]), linear=((0,),))


# Operators that move elements along some dimensions, which stay whole.


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> AxisRule:
    rank = len(call.inputs[0])
    axes = all_but(rank, (rank - 2, rank - 1))
    return AxisRule((axes,), (axes,), labels_in([axes]), linear=((0,),))


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def _cut_scatter(call: Call) -> AxisRule:
    """A tensor with a part along a dimension replaced."""
    rank = len(call.inputs[0])
    dim = call["dim"] % rank
    axes = all_but(rank, (dim,))
    part = axes if len(call.inputs[1]) == rank else axes[:dim] + axes[dim + 1 :]
    return AxisRule((axes, part), (axes,), labels_in([axes]), linear=((0, 1),))


@rule(aten.view_as_complex.default)
def _complex(call: Call) -> MapRule:
    return uncut(len(call.inputs[0]) - 1)


@rule(aten.view_as_real.default)
def _real(call: Call) -> MapRule:
    return uncut(len(call.inputs[0]))
