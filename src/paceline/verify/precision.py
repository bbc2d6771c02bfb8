"""The number types that verification runs in, and how equal two results must be in each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True)
class Tolerance:
    """How far two tensors may be apart: max |a - b| / max(max |b|, floor * largest of its kind) <= rel_error.

    Gradients that are zero in theory (of a key projection's bias, or of a bias before batch norm) are nothing but
    rounding, which is as large as the terms that cancel. The floor gives them the scale of the largest gradient:
    `rel_error * floor` of it is ignored, which is some 10 to 500 units in the last place.
    """

    rel_error: float
    floor: float


class Precision(Enum):
    """The type that both sides compute in. BFLOAT16 is autocast to it, with parameters in float32."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def storage(self) -> torch.dtype:
        """Type of parameters, buffers and floating-point batches."""
        return torch.float64 if self is Precision.FLOAT64 else torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """Type to which the forward pass is autocast."""
        return torch.bfloat16 if self is Precision.BFLOAT16 else None

    @property
    def parallel(self) -> Tolerance:
        """Of the plan, against its serial reference."""
        return {
            Precision.FLOAT64: Tolerance(1e-9, 1e-4),
            Precision.FLOAT32: Tolerance(1e-4, 1e-2),
            Precision.BFLOAT16: Tolerance(5e-2, 1e-1),
        }[self]

    @property
    def eager(self) -> Tolerance:
        """Of the captured program, against the unmodified module. Even a float64 module may compute in float32."""
        return Tolerance(1e-5, 1e-2) if self is Precision.FLOAT64 else self.parallel
