"""Reading and writing at indices: the indexed dimension stays whole; indices and other dimensions may be split."""

from __future__ import annotations

import torch

from paceline.placement.placements import PARTIAL, Shape
from paceline.placement.rules.rule import Axes, AxisRule, Call, Input, rule
from paceline.placement.rules.words import broadcast, labels_in, named, numbered, shape_of, slot, whole

aten = torch.ops.aten


@rule(aten.embedding.default)
def _embedding(call: Call) -> AxisRule:
    places = numbered(len(shape_of(call, "indices")))
    inputs = named(call, {"weight": (None, "d"), "indices": places})
    return AxisRule(inputs, ((*places, "d"),), labels_in(inputs), linear=((0,),))


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> AxisRule:
    places = numbered(len(shape_of(call, "indices")))
    inputs = named(call, {"grad_output": (*places, "d"), "indices": places})
    split = frozenset("d") if call["scale_grad_by_freq"] else labels_in(inputs)  # frequencies count all places
    return AxisRule(inputs, ((None, "d"),), split, linear=((0,),))


def _along(call: Call, *shapes: Shape) -> tuple[list[str | None], int]:
    """Labels of the dimensions in which all tensors agree, apart from the indexed one, which is returned too."""
    rank = len(shapes[0])
    dim = call["dim"] % max(rank, 1)
    agree = [len({shape[d] for shape in shapes}) == 1 for d in range(rank)]
    return [f"d{d}" if agree[d] and d != dim else None for d in range(rank)], dim


@rule(aten.gather.default)
def _gather(call: Call) -> AxisRule:
    labels, dim = _along(call, shape_of(call, "self"), shape_of(call, "index"))
    source: Axes = tuple(labels)
    places: Axes = tuple("i" if d == dim else label for d, label in enumerate(labels))
    return AxisRule((source, places), (places,), labels_in([places]), linear=((0,),))


@rule(aten.scatter.value, aten.scatter.src, aten.scatter_add.default, aten.scatter_reduce.two)
def _scatter(call: Call) -> AxisRule:
    labels, dim = _along(call, *call.inputs)
    rows: Axes = tuple(labels)
    if call.target is not aten.scatter_add.default:
        linear = ((0, 2),) if call.target is aten.scatter.src else ()
        return AxisRule((rows,) * len(call.inputs), (rows,), labels_in([rows]), linear=linear)
    # each rank adds the sources it has; the tensor they are added to counts once
    same = len(rows) > 0 and call.inputs[1][dim] == call.inputs[2][dim]
    added: Axes = tuple("i" if d == dim and same else label for d, label in enumerate(labels))
    return AxisRule((rows, added, added), (rows,), labels_in([added]), pinned={("i", 0): PARTIAL}, linear=((0, 2),))


@rule(aten.index_select.default)
def _index_select(call: Call) -> AxisRule:
    labels, dim = _along(call, shape_of(call, "self"))
    result: Axes = tuple("i" if d == dim else label for d, label in enumerate(labels))
    return AxisRule((tuple(labels), ("i",)), (result,), labels_in([result]), linear=((0,),))


@rule(aten.index_add.default)
def _index_add(call: Call) -> AxisRule:
    labels, dim = _along(call, shape_of(call, "self"))
    added: Axes = tuple("i" if d == dim else label for d, label in enumerate(labels))
    return AxisRule(
        (tuple(labels), ("i",), added),
        (tuple(labels),),
        labels_in([added]),
        pinned={("i", 0): PARTIAL},
        linear=((0, 2),),
    )


def _advanced(call: Call) -> tuple[Axes, dict[int, Axes], Axes, Shape] | None:
    """Axes of the indexed tensor, of each index (by input slot) and of the result, and the result's shape.

    None for masks, whose result has a shape that depends on values.
    """
    source = shape_of(call, "self")
    indices = list(call["indices"]) + [None] * (len(source) - len(call["indices"]))
    slots = {d: index.index for d, index in enumerate(indices) if isinstance(index, Input)}
    if any(call.dtypes[i] in (torch.bool, torch.uint8) for i in slots.values()):
        return None
    shapes = [call.inputs[i] for i in slots.values()]
    picked = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # untyped in torch
    places = numbered(len(picked), "i")
    rows: Axes = tuple(None if d in slots else f"d{d}" for d in range(len(source)))
    first, last = min(slots), max(slots)
    front = first if last - first + 1 == len(slots) else 0  # where the places appear in the result
    kept = [d for d in range(len(source)) if d not in slots]
    result: Axes = (*(rows[d] for d in kept[:front]), *places, *(rows[d] for d in kept[front:]))
    shape = (*(source[d] for d in kept[:front]), *picked, *(source[d] for d in kept[front:]))
    return rows, {i: broadcast(call.inputs[i], picked, places) for i in slots.values()}, result, shape


def _whole(call: Call) -> AxisRule:
    return AxisRule(tuple(map(whole, call.inputs)), tuple(map(whole, call.outputs)), frozenset())


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call) -> AxisRule:
    axes = _advanced(call)
    if axes is None:
        return _whole(call)
    rows, places, result, _ = axes
    inputs = tuple(places.get(i, rows) for i in range(len(call.inputs)))
    return AxisRule(inputs, (result,), labels_in([result]), linear=((0,),))


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: Call) -> AxisRule:
    axes = _advanced(call)
    if axes is None:
        return _whole(call)
    rows, places, result, shape = axes
    into, values = slot(call, "self"), slot(call, "values")
    assert into is not None and values is not None
    inputs = tuple(
        rows if i == into else broadcast(call.inputs[i], shape, result) if i == values else places[i]
        for i in range(len(call.inputs))
    )
    if not call["accumulate"]:
        return AxisRule(inputs, (rows,), labels_in([rows]), linear=((into, values),))
    # each rank adds the values it has; the tensor they are added to counts once
    pinned = {(label, into): PARTIAL for label in labels_in([result]) - labels_in([rows])}
    return AxisRule(inputs, (rows,), labels_in([result]), pinned=pinned, linear=((into, values),))
