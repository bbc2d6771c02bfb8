"""Normalisations: the axes that they normalise over stay whole, all others may be split."""

from __future__ import annotations

import torch

from paceline.placement.rules.rule import Axes, AxisRule, Call, Label, einsum, rule
from paceline.placement.rules.words import labels_in, named, numbered, replicated_where_absent, shape_of, slot, whole
from paceline.program import operators  # noqa: F401  (registers torch.ops.paceline)

aten = torch.ops.aten
ours = torch.ops.paceline


def _trailing(call: Call) -> tuple[Axes, Axes]:
    """Axes of the input of a layer norm and of its statistics, which keep the normalised dimensions with size 1."""
    normalized = len(call["normalized_shape"])
    leading = numbered(len(shape_of(call, "input")) - normalized)
    return leading + (None,) * normalized, leading + (None,) * normalized


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _layer_norm(call: Call) -> AxisRule:
    rows, statistics = _trailing(call)
    outputs = (rows,) + (statistics,) * (len(call.outputs) - 1)
    return AxisRule(named(call, {"input": rows}), outputs, labels_in([rows]))


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def _layer_norm_backward(call: Call) -> AxisRule:
    rows, statistics = _trailing(call)
    inputs = named(call, {"grad_out": rows, "input": rows, "mean": statistics, "rstd": statistics})
    parameters = whole(tuple(call["normalized_shape"]))
    return AxisRule(inputs, (rows,) + (parameters,) * (len(call.outputs) - 1), labels_in([rows]))


def _sites(call: Call, name: str) -> Axes:
    """Axes of a tensor [N, C, *]: batch, channel, places."""
    return ("n", "c", *numbered(len(shape_of(call, name)) - 2, "s"))


_PER_CHANNEL = ("weight", "bias", "mean", "rstd", "shift", "running_mean", "running_var", "save_mean", "save_invstd")


def _channelwise(call: Call, tensors: tuple[str, ...], outputs: tuple[Axes, ...], split: frozenset[Label]) -> AxisRule:
    """Rule of a batch norm: `tensors` are [N, C, *], parameters and statistics [C]."""
    axes: dict[str, Axes] = {name: _sites(call, name) for name in tensors}
    for name in _PER_CHANNEL:
        absent = slot(call, name) is None or shape_of(call, name) == (0,)
        axes[name] = (None,) if absent else ("c",)
    axes["sums"] = (None, "c")
    return AxisRule(named(call, axes), outputs, split, results=replicated_where_absent(outputs, range(1, len(outputs))))


@rule(ours.batch_norm_sums.default)
def _batch_norm_sums(call: Call) -> AxisRule:
    sites = _sites(call, "x")
    return _channelwise(call, ("x",), ((None, "c"),), labels_in([sites]))


einsum(ours.batch_norm_statistics.default, spec="sc,c->c,c,c", split="c")


@rule(ours.batch_norm_grad_sums.default)
def _batch_norm_grad_sums(call: Call) -> AxisRule:
    sites = _sites(call, "x")
    return _channelwise(call, ("g", "x"), ((None, "c"),), labels_in([sites]))


@rule(ours.batch_norm_apply.default)
def _batch_norm_apply(call: Call) -> AxisRule:
    sites = _sites(call, "x")
    return _channelwise(call, ("x",), (sites,), labels_in([sites]))


@rule(ours.batch_norm_input_grad.default)
def _batch_norm_input_grad(call: Call) -> AxisRule:
    sites = _sites(call, "x")
    return _channelwise(call, ("g", "x"), (sites,), labels_in([sites]))


# Torch's own batch norms, for programs in which they were not taken apart: in training only channels may be split.


def _statistics(call: Call, index: int) -> Axes:
    shape = call.outputs[index]
    return ("c",) if shape is not None and shape != (0,) else whole(shape)


@rule(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
)
def _native_batch_norm(call: Call) -> AxisRule:
    outputs = (_sites(call, "input"), *(_statistics(call, i) for i in range(1, len(call.outputs))))
    return _channelwise(call, ("input",), outputs, frozenset("c"))


@rule(aten.native_batch_norm_backward.default)
def _native_batch_norm_backward(call: Call) -> AxisRule:
    outputs = (_sites(call, "input"), ("c",), ("c",))
    return _channelwise(call, ("grad_out", "input"), outputs, frozenset("c"))
