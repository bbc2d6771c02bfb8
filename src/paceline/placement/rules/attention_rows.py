"""How attention is written where queries are split along time.

Where row i sees keys 0 to i, a rank must know which rows it has. Keys and values are whole on every rank; or they are
split as queries are and go round a ring of ranks, which takes memory for T/n of them instead of T (Liu, Zaharia,
Abbeel: Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023). While a rank computes with what it
has, what it needs next is under way. In the backward pass their gradients travel along, and once more to get home.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import REPLICATE, Shard
from paceline.placement.rules.rule import Call, Move, Strategy, Written
from paceline.placement.rules.words import shape_of
from paceline.placement.windows import window
from paceline.program import attention  # noqa: F401  (registers operators)

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
ours = torch.ops.paceline
RING = "ring"
_TIME = 2
_BLOCKS = (1, 2, 4, 8)


def rows(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
    """Write causal attention of a rank's rows to whole keys and values."""
    made = writer.call(ours.causal_rows.default, *_arguments(writer, arguments, strategy))
    return [writer.item(made, 0), writer.item(made, 1)]


def rows_backward(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
    """Write its gradients; those of keys and values are terms of a sum over ranks."""
    made = writer.call(ours.causal_rows_backward.default, *_arguments(writer, arguments, strategy))
    return [writer.item(made, 0), writer.item(made, 1), writer.item(made, 2)]


def _arguments(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> list[Any]:
    """Return those of the kernel, then which rows the rank has."""
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    tensors = [arguments[name] for name in names if name in arguments]
    where = writer.coordinate(), writer.parts, _blocks(writer, arguments, strategy)
    return [*tensors, *where, arguments.get("scale")]


def _blocks(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> list[int]:
    """Return the sizes of the blocks of queries; the first input is queries or the gradient of their results."""
    shard = strategy.inputs[0]
    assert isinstance(shard, Shard)
    return list(shard.sizes(arguments["query"].meta["val"].shape[_TIME] * writer.parts))


def ring_strategies(call: Call) -> tuple[Strategy, ...]:
    """Return the strategies that split all tensors of a call along time, for keys and values in a ring."""
    shards = [Shard(_TIME, blocks) for blocks in _BLOCKS]
    return tuple(Strategy((s,) * len(call.inputs), (s,) * len(call.outputs), RING) for s in shards)


def ring(call: Call) -> Written:
    """Return how the ring is written, and its price: as much travels as if keys and values were gathered."""
    return Written(_ring, (_round(call),))


def ring_backward(call: Call) -> Written:
    """Return how the ring of the backward pass is written: two go round, and gradients have one more turn."""
    home = Move(_round(call).nbytes, Shard(_TIME), Shard(_TIME + 1))
    return Written(_ring_backward, (_round(call), _round(call), home))


def _round(call: Call) -> Move:
    nbytes = (prod(shape_of(call, "key")) + prod(shape_of(call, "value"))) * call.dtypes[0].itemsize
    return Move(nbytes, Shard(_TIME), REPLICATE)


def _ring(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
    rest = writer.parts, _blocks(writer, arguments, strategy), arguments["is_causal"], arguments.get("scale")
    found: list[Node] = []
    for turn, pair in enumerate(_pairs(writer, arguments)):
        before: Sequence[Node | None] = found or [None, None]
        where = writer.coordinate(), turn
        here = writer.call(ours.ring_rows.default, arguments["query"], pair, *before, *where, *rest)
        found = [writer.item(here, 0), writer.item(here, 1)]
    return found


def _ring_backward(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
    rest = writer.parts, _blocks(writer, arguments, strategy), arguments["is_causal"], arguments.get("scale")
    query, results = arguments["query"], (arguments["out"], arguments["logsumexp"])
    found: list[Node] = []
    for turn, pair in enumerate(_pairs(writer, arguments)):
        where = writer.coordinate(), turn
        here = writer.call(ours.ring_rows_backward.default, arguments["grad_out"], query, pair, *results, *where, *rest)
        more = [writer.item(here, 0), writer.item(here, 1)]
        if found:  # of queries they stay, of keys and values they travel
            before = found[0], _next(writer, found[1])
            more = [writer.call(aten.add.Tensor, a, b) for a, b in zip(before, more, strict=True)]
        found = more
    home, width = _next(writer, found[1]), query.meta["val"].shape[-1]
    halves = [writer.call(aten.slice.Tensor, home, 3, start, start + width) for start in (0, width)]
    return [
        found[0],
        *(writer.call(aten.clone.default, half, memory_format=torch.contiguous_format) for half in halves),
    ]


def _pairs(writer: Writer, arguments: Mapping[str, Any]) -> Iterator[Node]:
    """Yield keys beside values, so that they travel together: this rank's, and then at each turn the next one's."""
    pair = writer.call(aten.cat.default, [arguments["key"], arguments["value"]], 3)
    for _ in range(writer.parts - 1):
        yield pair
        pair = _next(writer, pair)
    yield pair


def _next(writer: Writer, x: Node) -> Node:
    """What the rank before has."""
    piece = x.meta["val"].shape[_TIME]
    return writer.call(window, x, _TIME, -piece, piece, piece, "wrap", writer.axis, writer.parts)
