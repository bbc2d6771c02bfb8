"""From a rule to strategies: the placements of all inputs and outputs with which an operator may run on one axis."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from paceline.placement.placements import PARTIAL, REPLICATE, Blocks, Partial, Placement, Shape, Shard, divides
from paceline.placement.rules.rule import Axes, AxisRule, Call, Factors, Label, MapRule, Rule, Strategy

Slot = tuple[int, Shard]
"""A tensor of a call (inputs first, then outputs) and a split of it."""


def strategies(call: Call, rule: Rule, shards: Sequence[Collection[Shard]], parts: int) -> list[Strategy]:
    """Return every way to run a call on `parts` ranks: replicated, split along one axis, or on partial sums.

    Args:
        call: the operator call.
        rule: its rule.
        shards: the splits allowed for each input and then each output.
        parts: number of ranks on the mesh axis.

    Returns:
        The strategies in an order that depends on nothing but the arguments; the replicated one comes first.
    """
    count = len(call.inputs)
    found = [Strategy((REPLICATE,) * count, (REPLICATE,) * len(call.outputs))]
    candidates = _images(call, rule, shards, parts) if isinstance(rule, MapRule) else _splits(call, rule, shards, parts)
    for strategy in candidates:
        if _legal(call, strategy, shards, parts) and strategy not in found:
            found.append(strategy)
    return found


def implied(call: Call, rule: Rule, slot: int, shard: Shard, parts: int) -> list[Slot]:
    """Return how the other tensors of a call are split in a strategy that splits tensor `slot` as `shard`."""
    count = len(call.inputs)
    if isinstance(rule, MapRule):
        placement = rule.forward(shard, parts) if slot < count else rule.backward(shard, parts)
        others = range(count, count + len(call.outputs)) if slot < count else range(count)
        found = [(other, placement) for other in others if isinstance(placement, Shard)]
    else:
        tensors = rule.inputs + rule.outputs
        found, labels = [], list(_labels_at(tensors[slot], shard, rule, parts))
        for label, blocks in labels:
            found += [item for item in _bound(tensors, label, blocks, parts) if item[0] != slot]
        for strategy in rule.extra if not labels else ():  # where there is an axis, extras are other ways to split it
            placements = strategy.inputs + strategy.outputs
            if placements[slot] == shard:
                found += [(i, split) for i, split in enumerate(placements) if isinstance(split, Shard) and i != slot]
    shapes = call.inputs + call.outputs
    return [(other, split) for other, split in found if divides(shapes[other] or (), split, parts)]


def seeds(call: Call, rule: Rule, parts: int) -> list[Slot]:
    """Return splits in blocks that a rule itself brings up, such as a part of every group of channels."""
    if isinstance(rule, MapRule):
        return []
    tensors, shapes = rule.inputs + rule.outputs, call.inputs + call.outputs
    return [
        (slot, shard)
        for label in _ordered(rule)
        for slot, shard in _bound(tensors, label, 1, parts)
        if shard.blocks != 1 and divides(shapes[slot] or (), shard, parts)
    ]


def _images(call: Call, rule: MapRule, shards: Sequence[Collection[Shard]], parts: int) -> Iterator[Strategy]:
    """Carry every placement of the input through an operator that only rearranges."""
    placements: list[Placement] = [*_sorted(shards[0]), PARTIAL]
    for placement in placements:
        image = rule.forward(placement, parts)
        if image is not None:
            yield Strategy((placement,), (image,) * len(call.outputs))


def _splits(call: Call, rule: AxisRule, shards: Sequence[Collection[Shard]], parts: int) -> Iterator[Strategy]:
    """Split every axis in every number of blocks; then the rule's extras; then partial sums."""
    count = len(call.inputs)
    tensors = rule.inputs + rule.outputs
    for label in _ordered(rule):
        having = [slot for slot, axes in enumerate(tensors) if _is_there(call, slot) and _has(axes, label)]
        if not having:
            continue
        first = having[0]
        for shard in _sorted(shards[first]):
            for name, blocks in _labels_at(tensors[first], shard, rule, parts):
                bound = dict(_bound(tensors, label, blocks, parts)) if name == label else {}
                if bound:
                    yield Strategy(
                        tuple(bound.get(i, rule.pinned.get((label, i), REPLICATE)) for i in range(count)),
                        tuple(
                            bound.get(count + i, rule.results.get((label, i), PARTIAL))
                            if shape is not None
                            else REPLICATE
                            for i, shape in enumerate(call.outputs)
                        ),
                        label,
                    )
    yield from rule.extra
    for group in rule.linear:
        inputs: tuple[Placement, ...] = tuple(PARTIAL if i in group else REPLICATE for i in range(count))
        yield Strategy(inputs, tuple(REPLICATE if shape is None else PARTIAL for shape in call.outputs))


def _is_there(call: Call, slot: int) -> bool:
    return slot < len(call.inputs) or call.outputs[slot - len(call.inputs)] is not None


def _legal(call: Call, strategy: Strategy, shards: Sequence[Collection[Shard]], parts: int) -> bool:
    """Whether all splits are allowed and divide, and nothing that cannot be a sum is one.

    Booleans cannot be partial sums. Whole numbers can be, but not if they come from rounding a partial sum.
    """
    placements: tuple[Placement, ...] = strategy.inputs + strategy.outputs
    shapes: tuple[Shape | None, ...] = call.inputs + call.outputs
    dtypes = call.dtypes + call.output_dtypes
    for placement, shape, dtype, allowed in zip(placements, shapes, dtypes, shards, strict=True):
        if shape is None or dtype is None:
            continue
        if isinstance(placement, Shard) and not (placement in allowed and divides(shape, placement, parts)):
            return False
        if isinstance(placement, Partial) and dtype == torch.bool:
            return False
    terms = [d for p, d in zip(strategy.inputs, call.dtypes, strict=True) if p == PARTIAL]
    sums = [d for p, d in zip(strategy.outputs, call.output_dtypes, strict=True) if p == PARTIAL and d]
    return not any(map(_is_inexact, terms)) or all(map(_is_inexact, sums))


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _sorted(shards: Collection[Shard]) -> list[Shard]:
    return sorted(shards, key=Shard.order)


def _ordered(rule: AxisRule) -> list[Label]:
    return sorted(rule.split, key=str)


def shard_of(axes: Axes, label: Label, blocks: Blocks) -> Shard | None:
    """Return the split of a tensor that splits axis `label` in `blocks` blocks; None where it lacks the axis."""
    for dim, axis in enumerate(axes):
        if isinstance(axis, Factors):
            outer = 1
            for name, size in axis.axes:
                if name == label and name is not None:
                    return Shard(dim, outer * blocks) if isinstance(blocks, int) else None
                outer *= size
        elif axis == label and axis is not None:
            return Shard(dim, blocks)
    return None


def _has(axes: Axes, label: Label) -> bool:
    return shard_of(axes, label, 1) is not None


def _labels_at(axes: Axes, shard: Shard, rule: AxisRule, parts: int) -> Iterator[tuple[Label, Blocks]]:
    """Yield the axis that a split of a tensor splits, and in how many blocks."""
    axis = axes[shard.dim]
    if not isinstance(shard.blocks, int):
        if axis is not None and not isinstance(axis, Factors) and axis in rule.split:
            yield axis, shard.blocks
        return
    factors = axis.axes if isinstance(axis, Factors) else ((axis, 0),)
    outer = 1
    for name, size in factors:
        inside = shard.blocks % outer == 0 and (size == 0 or size % (shard.blocks // outer * parts) == 0)
        if inside and name is not None and name in rule.split:
            yield name, shard.blocks // outer
        outer *= size


def _bound(tensors: Sequence[Axes], label: Label, blocks: Blocks, parts: int) -> list[Slot]:
    """Return the split of every tensor that has the axis; empty when an axis inside a product does not divide."""
    found: list[Slot] = []
    for slot, axes in enumerate(tensors):
        shard = shard_of(axes, label, blocks)
        if shard is None:
            continue
        axis = axes[shard.dim]
        if isinstance(axis, Factors) and (not isinstance(blocks, int) or dict(axis.axes)[label] % (blocks * parts)):
            return []
        found.append((slot, shard))
    return found
