"""Differences between two runs, by name and relative to the scale of what is compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from paceline.verify.serial import Trajectory


class Kind(Enum):
    """What is compared: losses of all steps, gradients of the first, buffers and parameters after the last."""

    LOSS = "loss"
    GRADIENT = "gradient"
    BUFFER = "buffer"
    PARAMETER = "parameter"


Key = tuple[Kind, str]


@dataclass(frozen=True)
class Difference:
    """The largest error of a tensor anywhere, relative to its scale; infinite where one side is not finite."""

    kind: Kind
    name: str
    rel_error: float


def largest_gap(a: Tensor, b: Tensor) -> float:
    """Return max |a - b|; infinite where only one of the two is finite. Infinities and NaNs in the same place agree."""
    return _largest(_gaps(a, b))


def relative_gap(a: Tensor, b: Tensor, scale: float) -> float:
    """Return max |a - b| / max(|b|, scale), element by element."""
    found = _gaps(a, b)
    magnitude = b.abs() if b.is_complex() else b.double().abs()
    return _largest(torch.where(found == 0, 0.0, found / magnitude.clamp(min=scale)))


def _gaps(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_complex():
        a, b = a.double(), b.double()
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())


def _largest(gaps: Tensor) -> float:
    return float(gaps.nan_to_num(nan=math.inf, posinf=math.inf).max()) if gaps.numel() else 0.0


def gap(a: float, b: float) -> float:
    """Return the difference of two losses; infinite where only one of them is finite."""
    return largest_gap(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))


def loss_name(step: int) -> str:
    """Return the name of the loss of a step, counted from 0."""
    return f"step {step + 1}"


def gaps(serial: Trajectory, other: Trajectory) -> dict[Key, float]:
    """Return the largest absolute difference of everything that `serial` holds."""
    found: dict[Key, float] = {}
    for step, (a, b) in enumerate(zip(other.losses, serial.losses, strict=True)):
        found[Kind.LOSS, loss_name(step)] = gap(a, b)
    for name in serial.gradients.keys() | other.gradients.keys():
        either = serial.gradients.get(name, other.gradients.get(name))
        assert either is not None
        zero = torch.zeros_like(either)  # autograd has no gradient where a program may have one of zeros
        found[Kind.GRADIENT, name] = largest_gap(other.gradients.get(name, zero), serial.gradients.get(name, zero))
    found |= {(Kind.PARAMETER, name): largest_gap(other.parameters[name], p) for name, p in serial.parameters.items()}
    found |= {(Kind.BUFFER, name): largest_gap(other.buffers[name], b) for name, b in serial.buffers.items()}
    return found


def differences(found: Mapping[Key, float], serial: Trajectory, floor: float) -> tuple[Difference, ...]:
    """Return absolute differences relative to their scales, the worst first.

    The scale of a tensor is its own largest value in `serial`, but at least `floor` times the largest of its kind.
    """
    scale = _scales(serial, floor)
    relative = [
        Difference(kind, name, _ratio(size, scale.get((kind, name), 0.0))) for (kind, name), size in found.items()
    ]
    kinds = list(Kind)
    return tuple(sorted(relative, key=lambda item: (-item.rel_error, kinds.index(item.kind), item.name)))


def _ratio(size: float, scale: float) -> float:
    if size == 0.0:
        return 0.0
    return size / scale if scale else math.inf


def _scales(serial: Trajectory, floor: float) -> dict[Key, float]:
    scales: dict[Key, float] = {}
    losses = {loss_name(step): torch.tensor(loss, dtype=torch.float64) for step, loss in enumerate(serial.losses)}
    kinds = {
        Kind.LOSS: losses,
        Kind.GRADIENT: serial.gradients,
        Kind.PARAMETER: serial.parameters,
        Kind.BUFFER: serial.buffers,
    }
    for kind, tensors in kinds.items():
        own = {name: _magnitude(tensor) for name, tensor in tensors.items()}
        # Buffers have nothing to do with each other: a mask of huge numbers says nothing about a running mean.
        least = floor * max(own.values(), default=0.0) if kind is not Kind.BUFFER else 0.0
        for name in _names(kind, serial, own):
            scales[kind, name] = max(own.get(name, 0.0), least)
    return scales


def _names(kind: Kind, serial: Trajectory, own: Iterable[str]) -> Iterable[str]:
    return serial.parameters if kind is Kind.GRADIENT else own


def _magnitude(tensor: Tensor) -> float:
    """Return the largest finite magnitude in a tensor; 0 where there is none."""
    magnitude = tensor.detach().double().abs() if not tensor.is_complex() else tensor.detach().abs()
    finite = magnitude[magnitude.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0
