"""Reading and writing at indices.

Indices and the other dimensions may be split as they are. So may the indexed dimension, where what each rank then does
is written in `rules.indexed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.placement.placements import PARTIAL, REPLICATE, Placement, Shape, Shard
from paceline.placement.rules import indexed
from paceline.placement.rules.rule import Axes, AxisRule, Call, Input, Label, Strategy, Write, Written, rule
from paceline.placement.rules.words import broadcast, labels_in, numbered, shape_of, slot, whole

aten = torch.ops.aten
_ROWS = "rows"


def _along(call: Call, *shapes: Shape) -> tuple[list[str | None], int]:
    """Labels of the dimensions in which all tensors agree, apart from the indexed one, which is returned too."""
    rank = len(shapes[0])
    dim = call["dim"] % max(rank, 1)
    agree = [len({shape[d] for shape in shapes}) == 1 for d in range(rank)]
    return [f"d{d}" if agree[d] and d != dim else None for d in range(rank)], dim


def _split_rows(call: Call, dim: int, result: Placement, label: Label = _ROWS) -> tuple[Strategy, ...]:
    """The strategy that splits the indexed dimension of `self`, in contiguous pieces."""
    inputs: list[Placement] = [REPLICATE] * len(call.inputs)
    into = slot(call, "self")
    if into is None or not call.inputs[into]:
        return ()
    inputs[into] = Shard(dim)
    return (Strategy(tuple(inputs), (result,), label),)


@rule(aten.gather.default)
def _gather(call: Call) -> AxisRule:
    labels, dim = _along(call, shape_of(call, "self"), shape_of(call, "index"))
    source: Axes = tuple(labels)
    places: Axes = tuple("i" if d == dim else label for d, label in enumerate(labels))
    return AxisRule(
        (source, places),
        (places,),
        labels_in([places]),
        linear=((0,),),
        extra=_split_rows(call, dim, PARTIAL),
        written={_ROWS: Written(indexed.gather)},
    )


@rule(aten.scatter.value, aten.scatter.src, aten.scatter_reduce.two)
def _scatter(call: Call) -> AxisRule:
    labels, dim = _along(call, *call.inputs)
    rows: Axes = tuple(labels)
    return AxisRule(
        (rows,) * len(call.inputs),
        (rows,),
        labels_in([rows]),
        linear=((0, 2),) if call.target is aten.scatter.src else (),
        extra=_split_rows(call, dim, Shard(dim)),
        written={_ROWS: Written(indexed.scatter(call.target))},
    )


@rule(aten.scatter_add.default)
def _scatter_add(call: Call) -> AxisRule:
    """Each rank adds the sources it has; the tensor they are added to counts once."""
    labels, dim = _along(call, *call.inputs)
    rows: Axes = tuple(labels)
    same = len(rows) > 0 and call.inputs[1][dim] == call.inputs[2][dim]
    added: Axes = tuple("i" if d == dim and same else label for d, label in enumerate(labels))
    return AxisRule(
        (rows, added, added),
        (rows,),
        labels_in([added]),
        pinned={("i", 0): PARTIAL},
        linear=((0, 2),),
        extra=_split_rows(call, dim, Shard(dim)) if call.inputs[1] == call.inputs[2] else (),
        written={_ROWS: Written(indexed.scatter_add)},
    )


@rule(aten.index_select.default)
def _index_select(call: Call) -> AxisRule:
    labels, dim = _along(call, shape_of(call, "self"))
    result: Axes = tuple("i" if d == dim else label for d, label in enumerate(labels))
    return AxisRule(
        (tuple(labels), ("i",)),
        (result,),
        labels_in([result]),
        linear=((0,),),
        extra=_split_rows(call, dim, PARTIAL),
        written={_ROWS: Written(indexed.index_select)},
    )


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
        extra=_split_rows(call, dim, Shard(dim)),
        written={_ROWS: Written(indexed.index_add)},
    )


def _advanced(call: Call) -> tuple[Axes, dict[int, Axes], Axes, Shape] | None:
    """Axes of the indexed tensor, of each index (by input slot) and of the result, and the result's shape.

    None for masks, whose result has a shape that depends on values.
    """
    source = shape_of(call, "self")
    slots = _index_slots(call)
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


def _index_slots(call: Call) -> dict[int, int]:
    """The input slot of the index of each dimension that has one."""
    return {d: index.index for d, index in enumerate(call["indices"]) if isinstance(index, Input)}


def _trailing(result: Axes) -> int:
    """Number of dimensions of a result that come after the places."""
    behind = 0
    while behind < len(result) and not str(result[-1 - behind]).startswith("i"):
        behind += 1
    return behind


def _whole(call: Call) -> AxisRule:
    return AxisRule(tuple(map(whole, call.inputs)), tuple(map(whole, call.outputs)), frozenset())


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call) -> AxisRule:
    axes = _advanced(call)
    if axes is None:
        return _whole(call)
    rows, places, result, _ = axes
    inputs = tuple(places.get(i, rows) for i in range(len(call.inputs)))
    splits, written = _split_each(call, PARTIAL, indexed.index, _trailing(result))
    return AxisRule(inputs, (result,), labels_in([result]), linear=((0,),), extra=splits, written=written)


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
    linear = ((into, values),)
    splits, written = _split_each(call, None, indexed.index_put, _trailing(result))
    if not call["accumulate"]:
        return AxisRule(inputs, (rows,), labels_in([rows]), linear=linear, extra=splits, written=written)
    # each rank adds the values it has; the tensor they are added to counts once
    pinned = {(label, into): PARTIAL for label in labels_in([result]) - labels_in([rows])}
    return AxisRule(inputs, (rows,), labels_in([result]), pinned=pinned, linear=linear, extra=splits, written=written)


def _split_each(
    call: Call, result: Placement | None, write: Callable[[int, int], Write], trailing: int
) -> tuple[tuple[Strategy, ...], Mapping[Label, Written]]:
    """Strategies that split one of the indexed dimensions, and what is written for each; no result is split as well."""
    splits: list[Strategy] = []
    written: dict[Label, Written] = {}
    for dim in _index_slots(call):
        label = (_ROWS, dim)
        splits += _split_rows(call, dim, Shard(dim) if result is None else result, label)
        written[label] = Written(write(dim, trailing))
    return tuple(splits), written
