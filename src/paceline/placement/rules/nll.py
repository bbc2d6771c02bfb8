"""The loss at targets. Classes may be split: each rank counts the targets whose class it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import PARTIAL, REPLICATE, Placement, Shard
from paceline.placement.rules.localized import local_index, size_at
from paceline.placement.rules.rule import Axes, AxisRule, Call, Label, Strategy, Written, rule
from paceline.placement.rules.words import labels_in, named, numbered, shape_of, slot, whole

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
_NONE, _MEAN = 0, 1
_CLASSES = "classes"
_IGNORED = -100


def _axes(call: Call) -> tuple[Axes, Axes]:
    """Axes of the log-probabilities [N, C, *] (or [C]) and of the targets [N, *]."""
    rank = len(shape_of(call, "self"))
    if rank == 1:
        return (None,), whole(shape_of(call, "target"))
    sites = numbered(rank - 1)
    return (sites[0], None, *sites[1:]), sites


def _split_classes(call: Call, results: tuple[Placement, ...]) -> tuple[Strategy, ...]:
    classes = {"self": Shard(_class_dim(len(shape_of(call, "self")))), "weight": Shard(0)}
    inputs: list[Placement] = [REPLICATE] * len(call.inputs)
    for name, placement in classes.items():
        index = slot(call, name)
        if index is not None:
            inputs[index] = placement
    return (Strategy(tuple(inputs), results, _CLASSES),)


def _class_dim(rank: int) -> int:
    return min(rank - 1, 1)


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_forward(call: Call) -> AxisRule:
    scores, sites = _axes(call)
    inputs = named(call, {"self": scores, "target": sites})
    outputs = (sites if call["reduction"] == _NONE else (), ())
    if call["reduction"] == _MEAN:
        return AxisRule(inputs, outputs, frozenset())
    extra = _split_classes(call, (PARTIAL, PARTIAL))
    written: dict[Label, Written] = {_CLASSES: Written(_write_forward(call.target))}
    return AxisRule(inputs, outputs, labels_in(inputs), extra=extra, written=written)


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_backward(call: Call) -> AxisRule:
    # even a mean may be split here: the global weight comes in as an argument
    scores, sites = _axes(call)
    grad = sites if call["reduction"] == _NONE else ()
    inputs = named(call, {"self": scores, "target": sites, "grad_output": grad})
    extra = _split_classes(call, (Shard(_class_dim(len(scores))),))
    written: dict[Label, Written] = {_CLASSES: Written(_write_backward(call.target))}
    return AxisRule(inputs, (scores,), labels_in(inputs), linear=((0,),), extra=extra, written=written)


def _write_forward(target: Any) -> Any:
    def write(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
        local, ignored = _local_targets(writer, arguments)
        made = writer.call(target, arguments["self"], local, arguments["weight"], arguments["reduction"], ignored)
        return [writer.item(made, 0), writer.item(made, 1)]

    return write


def _write_backward(target: Any) -> Any:
    def write(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
        local, ignored = _local_targets(writer, arguments)
        first, last = (arguments[name] for name in ("grad_output", "total_weight"))
        middle = arguments["self"], local, arguments["weight"], arguments["reduction"], ignored
        return [writer.call(target, first, *middle, last)]

    return write


def _local_targets(writer: Writer, arguments: Mapping[str, Any]) -> tuple[Node, int]:
    """Return the targets as classes of a rank's piece, and what is in the place of those that do not count."""
    scores, targets, ignored = (arguments[name] for name in ("self", "target", "ignore_index"))
    size = size_at(scores, _class_dim(scores.meta["val"].ndim))
    if not 0 <= ignored < size * writer.parts:
        return local_index(writer, targets, size, ignored), ignored
    local = local_index(writer, targets, size, _IGNORED)
    is_ignored = writer.call(aten.eq.Scalar, targets, ignored)
    return writer.call(aten.masked_fill.Scalar, local, is_ignored, _IGNORED), _IGNORED
