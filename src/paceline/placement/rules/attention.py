"""Fused attention: queries [B, H, Tq, D], keys and values [B, G, Tk, D], with H a multiple of G (grouped queries).

Batch and heads may be split, and queries. With grouped queries a split of `g` gives whole groups to a rank, a split of
`r` some queries of every group, and all keys. Where row i sees keys 0 to i, a rank must know which rows it has: that is
an operator of its own. Attention with dropout draws its mask inside, so it stays whole.

The variants for GPUs are written from their schemas and CPU sibling; no test here runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.placements import Shape, Shard
from paceline.placement.rules.rule import Axes, AxisRule, Call, Factors, Label, Strategy, Written, rule
from paceline.placement.rules.words import named, replicated_where_absent, shape_of, slot
from paceline.program import attention  # noqa: F401  (registers operators)

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
ours = torch.ops.paceline
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _heads(call: Call) -> Label | Factors:
    heads, groups = shape_of(call, "query")[1], shape_of(call, "key")[1]
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
    rows: Axes = ("b", heads, "q", None)
    columns: Axes = ("b", "g", None, None)
    # one number per query; some kernels pad the queries, or add a dimension
    name = next((name for name in ("logsumexp", "log_sumexp") if slot(call, name) is not None), None)
    mask = "attn_mask" if "attn_mask" in call.arguments else "attn_bias"
    found: dict[str, Axes] = {name: rows for name in ("query", "grad_out", "grad_out_", "out")}
    found |= {"key": columns, "value": columns, mask: _mask_axes(call, mask)}
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


def _write_rows(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
    made = writer.call(ours.causal_rows.default, *_rows(writer, arguments, strategy, 0))
    return [writer.item(made, 0), writer.item(made, 1)]


def _write_rows_backward(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
    made = writer.call(ours.causal_rows_backward.default, *_rows(writer, arguments, strategy, 1))
    return [writer.item(made, 0), writer.item(made, 1), writer.item(made, 2)]


def _rows(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy, query: int) -> list[Any]:
    """Return the arguments of our operator: those of the kernel, then which rows the rank has."""
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    tensors = [arguments[name] for name in names if name in arguments]
    rows, shard = arguments["query"].meta["val"].shape[2], strategy.inputs[query]
    assert isinstance(shard, Shard)
    blocks = list(shard.sizes(rows * writer.parts))
    return [*tensors, writer.coordinate(), writer.parts, blocks, arguments.get("scale")]


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
        written={"q": Written(_write_rows)} if _is_causal(call) else {},
    )


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
        written={"q": Written(_write_rows_backward)} if _is_causal(call) else {},
    )


@rule(ours.causal_rows.default)
def _causal_rows(call: Call) -> AxisRule:
    """For a later axis; the rows are split already."""
    axes = _axes(call)
    return AxisRule(named(call, axes), (axes["query"], axes["query"][:3]), frozenset("bgr"))


@rule(ours.causal_rows_backward.default)
def _causal_rows_backward(call: Call) -> AxisRule:
    axes = _axes(call)
    return AxisRule(named(call, axes), (axes["query"], axes["key"], axes["value"]), frozenset("bgr"))
