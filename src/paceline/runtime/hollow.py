"""Giving back the memory of a user's parameters once they were cut into shards.

The user's module is kept to capture further batch shapes, which needs the shapes of its parameters but not their
values. Between captures its parameters read as NaN, so that using the module by mistake shows at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Hollow:
    """Parameters whose memory was given back."""

    def __init__(self) -> None:
        self._layouts: dict[nn.Parameter, tuple[int, ...]] = {}

    def release(self, parameter: nn.Parameter) -> None:
        """Let go of the memory of a parameter; it lives on only where somebody else holds it."""
        if parameter.is_floating_point():
            self._layouts[parameter] = parameter.stride()
            self._show_nan(parameter)

    @contextlib.contextmanager
    def shaped(self) -> Iterator[None]:
        """Inside, the parameters have their true strides, as a capture sees them, and no values at all."""
        for parameter, strides in self._layouts.items():
            parameter.data = _without_values(parameter, strides)
        try:
            yield
        finally:
            for parameter in self._layouts:
                self._show_nan(parameter)

    def _show_nan(self, parameter: nn.Parameter) -> None:
        nan = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        parameter.data = nan.expand(parameter.shape)


def _without_values(like: Tensor, strides: tuple[int, ...]) -> Tensor:
    shaped = torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device)
    shaped.untyped_storage().resize_(0)
    return shaped
