"""Fused attention: queries [B, H, Tq, D], keys and values [B, G, Tk, D], with H a multiple of G (grouped queries).

Batch and heads may be split, and queries. With grouped queries a split of `g` gives whole groups to a rank, a split of
`r` some queries of every group, and all keys. Where row i sees keys 0 to i, a rank must know which rows it has: that is
an operator of its own. Attention with dropout draws its mask inside, so it stays whole.

The variants for GPUs are written from their schemas and CPU sibling; no test here runs them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.placement.placements import Shape
from paceline.placement.rules.attention_rows import RING, ring, ring_backward, ring_strategies, rows, rows_backward
from paceline.placement.rules.rule import Axes, AxisRule, Call, Factors, Label, Written, rule
from paceline.placement.rules.words import named, replicated_where_absent, shape_of, slot

aten = torch.ops.aten
ours = torch.ops.paceline
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _heads(call: Call) -> Label | Factors:
    keys = "pair" if "pair" in call.arguments else "key"
    heads, groups = shape_of(call, "query")[1], shape_of(call, keys)[1]
    return "g" if heads == groups else Factors((("g", groups), ("r", heads // groups)))


def _mask_axes(call: Call, name: str) -> Axes:
    """Axes of a mask that broadcasts to [B, H, Tq, Tk]."""
    if slot(call, name) is None:
        return ()
    shape = shape_of(call, name)
    batch, heads, rows, _ = shape_of(call, "query")
    full: Shape = (batch, heads, rows, -1)
    axes: Axes = ("b", _heads(call), "q", None)
    skip = 4 - len(shape)
    return tuple(axes[skip + i] if size == full[skip + i] else None for i, size in enumerate(shape))


def _axes(call: Call) -> dict[str, Axes]:
    heads = _heads(call)
    row: Axes = ("b", heads, "q", None)
    column: Axes = ("b", "g", None, None)
    # one number per query; some kernels pad the queries, or add a dimension
    name = next((name for name in ("logsumexp", "log_sumexp") if slot(call, name) is not None), None)
    mask = "attn_mask" if "attn_mask" in call.arguments else "attn_bias"
    found: dict[str, Axes] = {name: row for name in ("query", "grad_out", "grad_out_", "out")}
    found |= {"key": column, "value": column, "pair": column, mask: _mask_axes(call, mask)}
    if name is not None:
        found[name] = _row_statistics(call, shape_of(call, name))
    return found


def _row_statistics(call: Call, shape: Shape | None) -> Axes:
    if shape is None or len(shape) < 3:
        return (None,) * len(shape or ())
    rows = "q" if shape[2] == shape_of(call, "query")[2] else None
    return ("b", _heads(call), rows) + (None,) * (len(shape) - 3)


def _is_causal(call: Call) -> bool:
    """Whether it is attention in which row i sees keys 0 to i, of which we can compute some rows."""
    causal = call.target in (FORWARD, BACKWARD) and call["is_causal"] and call["dropout_p"] == 0.0
    return causal and slot(call, "attn_mask") is None


def causal_length(call: Call) -> int | None:
    """Return the length of the sequence over which a call is causal attention; None where it is something else."""
    return shape_of(call, "query")[2] if _is_causal(call) else None


def _split(call: Call) -> frozenset[Label]:
    if call["dropout_p"] != 0.0:
        return frozenset()
    return frozenset("bgr") if call["is_causal"] and not _is_causal(call) else frozenset("bgrq")


def _offers_ring(call: Call) -> bool:
    """Whether keys and values may be split as queries are."""
    if call.target not in (FORWARD, BACKWARD) or call["dropout_p"] != 0.0 or slot(call, "attn_mask") is not None:
        return False
    query, key, value = (shape_of(call, name) for name in ("query", "key", "value"))
    return query[3] == key[3] == value[3] and query[2] == key[2]


@rule(
    FORWARD,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
def _attention(call: Call) -> AxisRule:
    axes = _axes(call)
    statistics = _row_statistics(call, call.outputs[1])
    others = tuple((None,) * len(shape or ()) for shape in call.outputs[2:])  # seeds, lengths, debugging
    outputs = (axes["query"], statistics, *others)
    split = _split(call)
    if statistics[2:3] != ("q",):
        split -= {"q"}
    return AxisRule(
        named(call, axes),
        outputs,
        split,
        results=replicated_where_absent(outputs, range(1, len(outputs))),
        extra=ring_strategies(call) if _offers_ring(call) else (),
        written=_written(call, Written(rows), ring),
    )


def _written(call: Call, of_rows: Written, of_ring: Callable[[Call], Written]) -> dict[Label, Written]:
    found: dict[Label, Written] = {"q": of_rows} if _is_causal(call) else {}
    return found | ({RING: of_ring(call)} if _offers_ring(call) else {})


@rule(
    BACKWARD,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
def _attention_backward(call: Call) -> AxisRule:
    axes = _axes(call)
    mask = _mask_axes(call, "attn_bias") if "attn_bias" in call.arguments else ()
    outputs = (axes["query"], axes["key"], axes["value"], mask)[: len(call.outputs)]
    statistics = axes.get("logsumexp", ())
    split = _split(call) if statistics[2:3] == ("q",) else _split(call) - {"q"}
    return AxisRule(
        named(call, axes),
        outputs,
        split,
        extra=ring_strategies(call) if _offers_ring(call) else (),
        written=_written(call, Written(rows_backward), ring_backward),
    )


@rule(ours.causal_rows.default, ours.ring_rows.default)
def _rows(call: Call) -> AxisRule:
    """For a later axis; the rows are split already."""
    axes = _axes(call)
    return AxisRule(named(call, axes), (axes["query"], axes["query"][:3]), frozenset("bgr"))


@rule(ours.causal_rows_backward.default, ours.ring_rows_backward.default)
def _rows_backward(call: Call) -> AxisRule:
    axes = _axes(call)
    columns = (axes["key"],) * (len(call.outputs) - 1)
    return AxisRule(named(call, axes), (axes["query"], *columns), frozenset("bgr"))
