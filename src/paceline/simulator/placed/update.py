"""The end of a step: the norm of the gradient and the optimizer's update of what one rank holds, as graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.optim import Optimizer

from paceline.program.fake import fake_mode
from paceline.simulator.placed.recording import recorded

MakeOptimizer = Callable[[nn.Module], Optimizer]
"""Makes the optimizer of a module's parameters."""


def adamw(module: nn.Module) -> Optimizer:
    """Return the optimizer of who names none."""
    return torch.optim.AdamW(module.parameters(), fused=True)


@dataclass(frozen=True)
class Update:
    """What a rank computes on the parameters that it holds, once its gradients are there.

    Attributes:
        add: adds the gradients of a further micro-batch.
        average: divides what micro-batches added up to.
        norm: of the gradient, and scaling by it where gradients are clipped.
        first: the optimizer's first update, which also makes its state.
        step: any later update.
        state_bytes: of the optimizer's state.
    """

    add: Graph
    average: Graph
    norm: Graph
    first: Graph
    step: Graph
    state_bytes: int


def update_of(trained: Sequence[Tensor], optimizer: MakeOptimizer, *, clips: bool = False) -> Update:
    """Return the update of parameters like these, which may be fake.

    Args:
        trained: the pieces of trained parameters on one rank.
        optimizer: makes it.
        clips: whether gradients are scaled by their norm.
    """
    with fake_mode():
        module = nn.Module()
        for number, piece in enumerate(trained):
            value = torch.empty(tuple(piece.shape), dtype=piece.dtype, device=piece.device)
            module.register_parameter(f"parameter_{number}", nn.Parameter(value))
        parameters = list(module.parameters())
        if not parameters:
            nothing = recorded(lambda: None, [])
            return Update(nothing, nothing, nothing, nothing, nothing, 0)
        made = optimizer(module)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        more = [torch.empty_like(gradient) for gradient in gradients]
        with torch.no_grad():
            add = recorded(lambda: [a.add_(b) for a, b in zip(gradients, more, strict=True)], [*gradients, *more])
            average = recorded(lambda: torch._foreach_mul_(gradients, 0.5), gradients)
            norm = recorded(lambda: _norm(gradients, clips), gradients)
        first = recorded(made.step, [*parameters, *gradients])
        state = [value for kept in made.state.values() for value in kept.values() if isinstance(value, Tensor)]
        step = recorded(made.step, [*parameters, *gradients, *state])
        return Update(add, average, norm, first, step, sum(value.nbytes for value in state))


def _norm(gradients: list[Tensor], clips: bool) -> None:
    norms = torch._foreach_norm(gradients)
    torch.stack([norm.double() for norm in norms]).square().sum().sqrt()
    if clips:
        torch._foreach_mul_(gradients, 0.5)
