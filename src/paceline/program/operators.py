"""Our own operators: the parts of batch normalisation, so that its statistics are those of the global batch.

Each sum is linear in the batch, so a split batch gives partial sums of two numbers per channel: one small all-reduce in
the forward pass and one in the backward pass. The elementwise parts stay fused.

`torch.ops.paceline.*`, all on x: [N, C, ...]:
    batch_norm_sums(x, shift) -> [2, C] in float64: sum(x - shift) and sum((x - shift)^2). Elements are added up in
        float32 about a value of this piece near their mean, where nothing cancels, and moved to `shift`, which is the
        same on every rank, in float64.
    batch_norm_statistics(sums, shift, count, eps) -> mean, variance, 1 / sqrt(variance + eps); `count` is the global
        number of elements per channel. One reader of the sums, so that they are reduced once.
    batch_norm_apply(x, mean, rstd, weight?, bias?) -> x's shape.
    batch_norm_grad_sums(g, x, mean, rstd) -> [2, C]: sum(g) and sum(g * normalised x).
    batch_norm_input_grad(g, x, mean, rstd, weight?, sums, count) -> gradient of x; `count` is the global number of
        elements per channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_LIBRARY: Any = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]  # untyped in torch
_LIBRARY.define("batch_norm_sums(Tensor x, Tensor shift) -> Tensor")
_LIBRARY.define("batch_norm_statistics(Tensor sums, Tensor shift, int count, float eps) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("batch_norm_apply(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias) -> Tensor")
_LIBRARY.define("batch_norm_grad_sums(Tensor g, Tensor x, Tensor mean, Tensor rstd) -> Tensor")
_LIBRARY.define(
    "batch_norm_input_grad(Tensor g, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor sums, int count)"
    " -> Tensor"
)


def _per_channel(x: Tensor, values: Tensor) -> Tensor:
    return values.view([1, -1] + [1] * (x.ndim - 2))


def _reduced_dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _sums(x: Tensor, shift: Tensor) -> Tensor:
    dims = _reduced_dims(x)
    near = x[:1].to(shift.dtype).mean(dims)
    centred = x.to(shift.dtype) - _per_channel(x, near)
    first = centred.sum(dims).double()
    second = centred.mul_(centred).sum(dims).double()
    distance = near.double() - shift.double()
    moved = distance * (x.numel() // x.shape[1])
    return torch.stack([first + moved, second + distance * (2 * first + moved)])


def _statistics(sums: Tensor, shift: Tensor, count: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    means = sums / count
    variance = torch.addcmul(means[1], means[0], means[0], value=-1).clamp_min_(0.0)
    mean, rstd = shift + means[0], torch.rsqrt(variance + eps)
    return mean.to(shift.dtype), variance.to(shift.dtype), rstd.to(shift.dtype)


def _affine(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """X * scale + offset per channel; torch's batch norm in evaluation is one fused pass over memory."""
    zero, one = torch.zeros_like(scale), torch.ones_like(scale)
    normalised: Tensor = aten.native_batch_norm(x, scale, offset, zero, one, False, 0.0, 0.0)[0]
    return normalised


def _apply(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scale = rstd if weight is None else rstd * weight
    offset = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    return _affine(x, scale, offset)


def _grad_sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    variance = rstd.pow(-2)
    _, weight_grad, bias_grad = aten.native_batch_norm_backward(
        g, x, None, mean, variance, None, None, False, 0.0, [False, True, True]
    )
    return torch.stack([bias_grad, weight_grad])


def _input_grad(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, sums: Tensor, count: int
) -> Tensor:
    # dx = scale * (g - mean(g) - xhat * mean(g * xhat)) = scale * g + slope * x + offset
    scale = rstd if weight is None else rstd * weight
    mean_g, mean_gx = sums[0] / count, sums[1] / count
    slope = -scale * rstd * mean_gx
    offset = -scale * mean_g - slope * mean
    return _affine(x, slope, offset).addcmul_(g, _per_channel(g, scale).to(g.dtype))


def _fake_sums(x: Tensor, shift: Tensor) -> Tensor:
    return shift.new_empty((2, x.shape[1]), dtype=torch.float64)


def _fake_statistics(sums: Tensor, shift: Tensor, count: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(shift), torch.empty_like(shift), torch.empty_like(shift)


def _fake_like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _fake_grad_sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return mean.new_empty((2, x.shape[1]))


for _name, _kernel, _fake in (
    ("batch_norm_sums", _sums, _fake_sums),
    ("batch_norm_statistics", _statistics, _fake_statistics),
    ("batch_norm_apply", _apply, _fake_like),
    ("batch_norm_grad_sums", _grad_sums, _fake_grad_sums),
    ("batch_norm_input_grad", _input_grad, _fake_like),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"paceline::{_name}", _fake, lib=_LIBRARY)
