"""Small words in which the rules are written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from paceline.placement.placements import REPLICATE, Placement, Shape, Shard, local_shape
from paceline.placement.rules.rule import Axes, Call, Factors, Input, Label, Localize, MapRule, Strategy


def inputs_in(value: Any) -> Iterator[int]:
    """Yield the input slots named in an argument."""
    if isinstance(value, Input):
        yield value.index
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from inputs_in(item)


def slot(call: Call, name: str) -> int | None:
    """Return the input slot of a tensor argument, or None when the call goes without it."""
    return next(inputs_in(call.arguments.get(name)), None)


def shape_of(call: Call, name: str) -> Shape:
    """Return the shape of a tensor argument that is present."""
    index = slot(call, name)
    assert index is not None, f"{call.target} goes without {name}"
    return call.inputs[index]


def output_of(call: Call) -> Shape:
    """Return the shape of the first result, which is there."""
    shape = call.outputs[0]
    assert shape is not None, f"{call.target} gives no tensor"
    return shape


def named(call: Call, axes: Mapping[str, Axes]) -> tuple[Axes, ...]:
    """Return the axes of every input, given by argument name; tensors that are not named stay whole."""
    found = [whole(shape) for shape in call.inputs]
    for name, value in call.arguments.items():
        if name in axes:
            for index in inputs_in(value):
                found[index] = axes[name]
    return tuple(found)


def whole(shape: Shape | None) -> Axes:
    """Axes of a tensor none of whose dimensions is split."""
    return (None,) * len(shape or ())


def numbered(count: int, prefix: str = "d") -> Axes:
    """Return `count` different labels."""
    return tuple(f"{prefix}{i}" for i in range(count))


def all_but(rank: int, dims: Collection[int]) -> Axes:
    """Return labels for all dimensions but these, which stay whole."""
    return tuple(None if d in dims else label for d, label in enumerate(numbered(rank)))


def uncut(dim: int) -> MapRule:
    """Return the rule of what carries every split but those of one dimension."""

    def carry(placement: Placement, parts: int) -> Placement | None:
        return None if isinstance(placement, Shard) and placement.dim == dim else placement

    return MapRule(carry, carry)


def labels_in(axes: Iterable[Axes]) -> frozenset[Label]:
    """Return every label that occurs."""
    found: set[Label] = set()
    for tensor in axes:
        for axis in tensor:
            if isinstance(axis, Factors):
                found |= {label for label, _ in axis.axes if label is not None}
            elif axis is not None:
                found.add(axis)
    return frozenset(found)


def broadcast(shape: Shape, full: Shape, axes: Axes) -> Axes:
    """Axes of a tensor of `shape` that broadcasts against one of shape `full` with `axes`."""
    offset = len(full) - len(shape)
    if offset < 0:
        return whole(shape)
    return tuple(axes[offset + i] if size == full[offset + i] else None for i, size in enumerate(shape))


def replicated_where_absent(outputs: tuple[Axes, ...], slots: Iterable[int]) -> dict[tuple[Label, int], Placement]:
    """Say that these outputs do not depend on labels that they lack (they are no partial sums)."""
    labels = labels_in(outputs)
    return {(label, index): REPLICATE for index in slots for label in labels - labels_in([outputs[index]])}


def sized(name: str, shape: Shape | None) -> Localize:
    """Localize the argument `name`, which repeats the shape of the first output."""

    def localize(arguments: dict[str, Any], strategy: Strategy, parts: int) -> dict[str, Any]:
        return {name: list(local_shape(shape or (), strategy.outputs[0], parts))}

    return localize
