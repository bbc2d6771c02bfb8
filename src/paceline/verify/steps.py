"""Optimizer steps whose results can be compared: the same for eager modules, captured programs and plans.

The optimizer is SGD with momentum, because its update is linear in the gradients: an error in them stays as large as it
is. Adam divides each gradient by its own size, so that the first step of one that is zero in theory is its rounding
blown up to a whole learning rate; equal runs would look different. The learning rate makes the largest first change
one hundredth of the largest parameter, so that changes are seen and nothing diverges whatever the scale of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from paceline.program.capture import Batch
from paceline.verify.subject import SEED

_FIRST_CHANGE = 0.01
MOMENTUM = 0.9


def run_steps(
    differentiate: Callable[[Batch, int], float],
    parameters: Iterable[nn.Parameter],
    batches: Iterable[Batch],
    *,
    rate: float | None = None,
    after_first: Callable[[], None],
) -> tuple[list[float], float]:
    """Run a step per batch, and return the losses and the learning rate.

    Args:
        differentiate: given a batch and a seed, sets every parameter's gradient and returns the loss.
        parameters: what is optimized.
        batches: one per step.
        rate: learning rate; by default one that suits the first gradients.
        after_first: called when the first gradients are there, before parameters change.
    """
    found = list(parameters)
    losses = []
    optimizer: torch.optim.Optimizer | None = None
    for number, batch in enumerate(batches):
        losses.append(differentiate(batch, SEED + number))
        if optimizer is None:
            after_first()
            rate = _suitable_rate(found) if rate is None else rate
            optimizer = torch.optim.SGD(found, lr=rate, momentum=MOMENTUM)
        optimizer.step()
        optimizer.zero_grad()
    assert rate is not None, "there is at least one step"
    return losses, rate


@torch.no_grad()
def _suitable_rate(parameters: Sequence[nn.Parameter]) -> float:
    value = max((float(p.abs().max()) for p in parameters if p.numel()), default=0.0)
    gradient = max((float(p.grad.abs().max()) for p in parameters if p.grad is not None and p.numel()), default=0.0)
    return _FIRST_CHANGE * (value or 1.0) / (gradient or 1.0)
