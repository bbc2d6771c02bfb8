"""Embeddings.

Their rows may be split, as in Megatron-LM: each rank looks up those that it has, and the results are all-reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import PARTIAL, REPLICATE, Shard
from paceline.placement.rules.localized import local_index, local_or_first, size_at, zero_at
from paceline.placement.rules.rule import AxisRule, Call, Label, Strategy, Written, rule
from paceline.placement.rules.words import labels_in, named, numbered, shape_of

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
_ROWS = "rows"


@rule(aten.embedding.default)
def _embedding(call: Call) -> AxisRule:
    places = numbered(len(shape_of(call, "indices")))
    inputs = named(call, {"weight": (None, "d"), "indices": places})
    rows = Strategy((Shard(0), REPLICATE), (PARTIAL,), _ROWS)
    written: dict[Label, Written] = {_ROWS: Written(_write_lookup)}
    return AxisRule(inputs, ((*places, "d"),), labels_in(inputs), linear=((0,),), extra=(rows,), written=written)


def _write_lookup(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
    weight = arguments["weight"]
    local, elsewhere = local_or_first(writer, arguments["indices"], size_at(weight, 0))
    return [zero_at(writer, writer.call(aten.embedding.default, weight, local), elsewhere, 1)]


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> AxisRule:
    places = numbered(len(shape_of(call, "indices")))
    inputs = named(call, {"grad_output": (*places, "d"), "indices": places})
    if call["scale_grad_by_freq"]:  # frequencies count all places
        return AxisRule(inputs, ((None, "d"),), frozenset("d"), linear=((0,),))
    rows = Strategy((REPLICATE, REPLICATE), (Shard(0),), _ROWS)
    written: dict[Label, Written] = {_ROWS: Written(_write_gradient)}
    return AxisRule(inputs, ((None, "d"),), labels_in(inputs), linear=((0,),), extra=(rows,), written=written)


def _write_gradient(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
    """Other ranks' rows, and that of the padding, become one row more, which is skipped."""
    indices, padding = arguments["indices"], arguments["padding_idx"]
    size = arguments["num_weights"] // writer.parts
    local = local_index(writer, indices, size, size)
    if padding >= 0:
        local = writer.call(aten.masked_fill.Scalar, local, writer.call(aten.eq.Scalar, indices, padding), size)
    gradient = writer.call(
        aten.embedding_dense_backward.default, arguments["grad_output"], local, size + 1, size, False
    )
    return [writer.call(aten.slice.Tensor, gradient, 0, 0, size)]
