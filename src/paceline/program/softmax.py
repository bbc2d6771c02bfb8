"""Our own operators for softmax and cross-entropy: few passes over memory, and classes that may be split over ranks.

The logits of a language model are its largest tensor. For a cross-entropy and its gradient PyTorch takes exponentials
twice and makes three tensors of their size; with these operators it is once and two. They work on stretches that fit
the processor's cache. All sums along the classes are results of their own, so that a split of the classes gives partial
sums, as in Megatron-LM (Shoeybi et al., 2019).

`torch.ops.paceline.*`, for x: [..., C, ...] with classes along `dim`; maxima and sums along it are [..., 1, ...]:
    exponentials(x, maximum, dim) -> exp(x - maximum), which is of x's shape, and its sum.
    exponential_sums(x, maximum, dim) -> the sum alone.
    log_softmax_apply(x, maximum, total, dim) -> x - maximum - log(total), of x's shape.
    softmax_grad(grad, result, total, dim, log) -> gradient of the input of a softmax, of x's shape; `total` is the sum
        of grad for the logarithm of a softmax, of grad * result for a softmax.
    cross_entropy_grad(exponentials, factor, target, scale) -> for exponentials: [N, C] and the others [N],
        exponentials * factor, less `scale` at the class `target`; a negative target is a class of another rank.
Exponentials and sums are of float32 where x is of half precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_LIBRARY: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch
_LIBRARY.define("exponentials(Tensor x, Tensor maximum, int dim) -> (Tensor, Tensor)")
_LIBRARY.define("exponential_sums(Tensor x, Tensor maximum, int dim) -> Tensor")
_LIBRARY.define("log_softmax_apply(Tensor x, Tensor maximum, Tensor total, int dim) -> Tensor")
_LIBRARY.define("softmax_grad(Tensor grad, Tensor result, Tensor total, int dim, bool log) -> Tensor")
_LIBRARY.define("cross_entropy_grad(Tensor exponentials, Tensor factor, Tensor target, Tensor scale) -> Tensor")
_STRETCH_BYTES = 512 << 10
"""What a core works on at a time: it stays in the cache from one operator to the next."""


def _flat(x: Tensor, dim: int) -> Tensor:
    """View x as [outer, C, inner]."""
    dim %= x.ndim
    return x.reshape(prod(x.shape[:dim]), x.shape[dim], prod(x.shape[dim + 1 :]))


def _stretches(x: Tensor) -> Iterator[slice]:
    """Cut the first dimension into stretches; a GPU takes it at once."""
    rows = x.shape[0]
    row_bytes = max(prod(x.shape[1:]) * x.element_size(), 1)
    step = max(_STRETCH_BYTES * torch.get_num_threads() // row_bytes, 1) if x.is_cpu else max(rows, 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _new_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _exponentials(x: Tensor, maximum: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    flat, largest = _flat(x, dim), _flat(maximum, dim)
    made, totals = (_new_like(t, _sum_dtype(x.dtype)) for t in (flat, largest))
    for rows in _stretches(flat):
        torch.sub(flat[rows], largest[rows], out=made[rows]).exp_()
        torch.sum(made[rows], 1, keepdim=True, out=totals[rows])
    return made.view(x.shape), totals.view(maximum.shape)


def _exponential_sums(x: Tensor, maximum: Tensor, dim: int) -> Tensor:
    flat, largest = _flat(x, dim), _flat(maximum, dim)
    totals = _new_like(largest, _sum_dtype(x.dtype))
    room = None
    for rows in _stretches(flat):
        piece = flat[rows]
        # room that were new for each stretch would cost more than what is done in it
        room = _new_like(piece, totals.dtype) if room is None else room[: piece.shape[0]]
        torch.sub(piece, largest[rows], out=room).exp_()
        torch.sum(room, 1, keepdim=True, out=totals[rows])
    return totals.view(maximum.shape)


def _log_softmax_apply(x: Tensor, maximum: Tensor, total: Tensor, dim: int) -> Tensor:
    flat, largest, logarithm = _flat(x, dim), _flat(maximum, dim), _flat(total, dim).log()
    out = _new_like(flat, x.dtype)
    for rows in _stretches(flat):
        torch.sub(flat[rows], largest[rows], out=out[rows]).sub_(logarithm[rows])
    return out.view(x.shape)


def _softmax_grad(grad: Tensor, result: Tensor, total: Tensor, dim: int, log: bool) -> Tensor:
    given, made, sums = _flat(grad, dim), _flat(result, dim), _flat(total, dim).to(grad.dtype)
    out = _new_like(given, grad.dtype)
    for rows in _stretches(given):
        if log:
            torch.exp(made[rows], out=out[rows]).mul_(sums[rows]).neg_().add_(given[rows])
        else:
            torch.sub(given[rows], sums[rows], out=out[rows]).mul_(made[rows])
    return out.view(grad.shape)


def _cross_entropy_grad(exponentials: Tensor, factor: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    grad = exponentials * factor.unsqueeze(1)
    taken = (-scale).masked_fill(target < 0, 0.0)
    return grad.scatter_add_(1, target.clamp(min=0).unsqueeze(1), taken.unsqueeze(1))


def _fake_exponentials(x: Tensor, maximum: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _new_like(x, _sum_dtype(x.dtype)), _new_like(maximum, _sum_dtype(x.dtype))


def _fake_sums(x: Tensor, maximum: Tensor, dim: int) -> Tensor:
    return _new_like(maximum, _sum_dtype(x.dtype))


def _fake_like(x: Tensor, *_: object) -> Tensor:
    return _new_like(x, x.dtype)


for _name, _kernel, _fake in (
    ("exponentials", _exponentials, _fake_exponentials),
    ("exponential_sums", _exponential_sums, _fake_sums),
    ("log_softmax_apply", _log_softmax_apply, _fake_like),
    ("softmax_grad", _softmax_grad, _fake_like),
    ("cross_entropy_grad", _cross_entropy_grad, _fake_like),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"paceline::{_name}", _fake, lib=_LIBRARY)
