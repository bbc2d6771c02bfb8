"""`constrain`: a user's word on where an activation lives, kept in the captured program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch
_LIBRARY.define("constrain(Tensor x, str placements) -> Tensor")
_LIBRARY.impl("constrain", lambda x, placements: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("paceline::constrain", lambda x, placements: torch.empty_like(x), lib=_LIBRARY)


class _Constrain(torch.autograd.Function):
    """The gradient lives where the activation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, placements: str) -> Tensor:
        ctx.placements = placements
        constrained: Tensor = torch.ops.paceline.constrain(x, placements)
        return constrained

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.ops.paceline.constrain(gradients[0], ctx.placements), None


def constrain(x: Tensor, **placements: str) -> Tensor:
    """Return `x`, which a plan shall place so along the axes that are named.

    What is not said is left to the solver, and axes that the mesh does not have are ignored. Gradients of `x` are
    placed as `x` is. Outside of a captured step it is `x` itself.

    Args:
        x: an activation, inside of a module's `forward`.
        placements: for an axis such as `tp`, one of `R` (whole), `P` (a term of a sum), `S0` (split along dimension 0),
            `S0/3` (in three blocks) or `S0/512+128` (in blocks of these sizes).
    """
    if not torch.compiler.is_compiling():
        return x
    text = ",".join(f"{axis}={placement}" for axis, placement in sorted(placements.items()))
    constrained: Tensor = _Constrain.apply(x, text)  # type: ignore[no-untyped-call]  # untyped in torch
    return constrained
