"""Operators that are taken apart during capture, because their parts can be split and they cannot.

A mean becomes a sum and a division, so that a split batch gives a partial sum. Dropout becomes the draw of its mask,
with the same use of the generator as the eager operator, and a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from paceline.program import operators  # noqa: F401  (registers torch.ops.paceline)

aten = torch.ops.aten
ours = torch.ops.paceline
_MEAN = 1
_SUM = 2


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _valid_weight(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(_accumulation_dtype(x.dtype))
    picked = weight[torch.where(valid, target, 0)]
    return torch.where(valid, picked, torch.zeros_like(picked)).sum().to(_accumulation_dtype(x.dtype))


def _nll_forward_of(
    operator: Any,
) -> Callable[[Tensor, Tensor, Tensor | None, int, int], tuple[Tensor, Tensor]]:
    def decomposed(
        x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        if reduction != _MEAN:
            return NotImplemented  # type: ignore[no-any-return]  # torch's word for: leave it whole
        total, _ = operator(x, target, weight, _SUM, ignore_index)
        count = _valid_weight(x, target, weight, ignore_index)
        return (total / count).to(x.dtype), count

    return decomposed


def _nll_backward_of(operator: Any) -> Callable[..., Tensor]:
    def decomposed(
        grad: Tensor,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignore_index: int,
        total_weight: Tensor,
    ) -> Tensor:
        if reduction != _MEAN:
            return NotImplemented  # type: ignore[no-any-return]  # torch's word for: leave it whole
        scaled = (grad / total_weight).to(grad.dtype)
        unused = total_weight.to(x.dtype)
        gradient: Tensor = operator(scaled, x, target, weight, _SUM, ignore_index, unused)
        return gradient

    return decomposed


def _mean_dim(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    result = dtype or x.dtype
    dims = [d % x.ndim for d in dim] if dim else list(range(x.ndim))
    count = prod(x.shape[d] for d in dims)
    total = aten.sum.dim_IntList(x, dims, keepdim, dtype=_accumulation_dtype(result))
    mean: Tensor = (total * (1.0 / count)).to(result)
    return mean


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _mean_dim(x, None, dtype=dtype)


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p in (0.0, 1.0):
        return NotImplemented  # type: ignore[no-any-return]  # torch's word for: leave it whole
    # On the CPU exactly eager's draw, which goes through the mask in the order in which `x` lies in memory.
    order = _memory_order(x)
    ones = torch.ones([x.shape[dim] for dim in order], dtype=x.dtype, device=x.device)
    keep = aten.bernoulli.p(ones, 1.0 - p)
    if order != sorted(order):
        keep = keep.permute([order.index(dim) for dim in range(x.ndim)])
    return x * keep * (1.0 / (1.0 - p)), keep.to(torch.bool)


def _memory_order(x: Tensor) -> list[int]:
    """Return the dimensions from the slowest to the fastest, as they are in memory that is laid out like `x`."""
    strides = torch.empty_like(x).stride()
    return sorted(range(x.ndim), key=lambda dim: (-strides[dim], dim))


def recurrent_layers(
    layers_of_torch: Callable[..., tuple[Tensor, list[Any]]],
    x: Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer: Callable[..., Any],
) -> tuple[Tensor, list[Any]]:
    """Take a recurrent network apart with torch's own function, but with dropout between layers, which that forgets.

    The arguments are those of torch's function; x is [T, B, D], or [B, T, D] with `batch_first`.
    """
    directions = 1 + bidirectional
    x = x.transpose(0, 1) if batch_first else x
    final: list[Any] = []
    for number in range(num_layers):
        of_layer = slice(number * directions, (number + 1) * directions)
        x, last = layers_of_torch(
            x, hidden[of_layer], params[of_layer], has_biases, 1, 0.0, train, bidirectional, False, layer
        )
        final += last
        if train and number < num_layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return x.transpose(0, 1) if batch_first else x, final


def _batch_norm_statistics(x: Tensor, running_mean: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor, int]:
    count = x.numel() // x.shape[1]
    dtype = _accumulation_dtype(x.dtype)
    shift = torch.zeros(x.shape[1], dtype=dtype, device=x.device) if running_mean is None else running_mean.detach()
    mean, variance, rstd = ours.batch_norm_statistics(ours.batch_norm_sums(x, shift), shift, count, eps)
    return mean, variance, rstd, count


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if not training:
        rstd = torch.rsqrt(running_var + eps)
        empty = x.new_empty(0)
        return ours.batch_norm_apply(x, running_mean, rstd, weight, bias), empty, empty, running_mean, running_var
    mean, variance, rstd, count = _batch_norm_statistics(x, running_mean, eps)
    new_mean = running_mean * (1 - momentum) + mean.to(running_mean.dtype) * momentum
    new_var = running_var * (1 - momentum) + variance.to(running_var.dtype) * (momentum * count / max(count - 1, 1))
    return ours.batch_norm_apply(x, mean, rstd, weight, bias), mean, rstd, new_mean, new_var


def _batch_norm_no_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, _, rstd, _ = _batch_norm_statistics(x, None, eps)
    return ours.batch_norm_apply(x, mean, rstd, weight, bias), mean, rstd


def _batch_norm_no_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    empty = x.new_empty(0)
    return ours.batch_norm_apply(x, mean, torch.rsqrt(var + eps), weight, bias), empty, empty


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not train:
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, torch.rsqrt(running_var + eps)
    else:
        assert save_mean is not None and save_rstd is not None
        mean, rstd = save_mean, save_rstd
    sums = ours.batch_norm_grad_sums(grad, x, mean, rstd)
    grad_x: Tensor | None = None
    if output_mask[0] and train:
        grad_x = ours.batch_norm_input_grad(grad, x, mean, rstd, weight, sums, x.numel() // x.shape[1])
    elif output_mask[0]:
        scale = rstd if weight is None else rstd * weight
        grad_x = grad * scale.view([1, -1] + [1] * (x.ndim - 2)).to(grad.dtype)
    return grad_x, sums[1] if output_mask[1] else None, sums[0] if output_mask[2] else None


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions used by every capture."""
    return dict(_table())


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    """Make them once: to look them up in PyTorch takes as long as to trace some operators."""
    from_torch = get_decompositions(
        [
            aten.mse_loss,
            aten.mse_loss_backward,
            aten.smooth_l1_loss,
            aten.smooth_l1_loss_backward,
            aten.huber_loss,
            aten.huber_loss_backward,
            aten.binary_cross_entropy,
            aten.binary_cross_entropy_backward,
            aten.binary_cross_entropy_with_logits,
            aten.soft_margin_loss,
            aten.soft_margin_loss_backward,
        ]
    )
    return {
        **from_torch,
        aten.nll_loss_forward.default: _nll_forward_of(aten.nll_loss_forward),
        aten.nll_loss_backward.default: _nll_backward_of(aten.nll_loss_backward),
        aten.nll_loss2d_forward.default: _nll_forward_of(aten.nll_loss2d_forward),
        aten.nll_loss2d_backward.default: _nll_backward_of(aten.nll_loss2d_backward),
        aten.mean.default: _mean,
        aten.mean.dim: _mean_dim,
        aten.native_dropout.default: _dropout,
        aten._native_batch_norm_legit_functional.default: _batch_norm,
        aten._native_batch_norm_legit.no_stats: _batch_norm_no_stats,
        aten._native_batch_norm_legit_no_training.default: _batch_norm_no_training,
        aten.native_batch_norm_backward.default: _batch_norm_backward,
    }
