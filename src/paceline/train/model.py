"""The user's module, built the same on every rank from a recipe. Knows factories and number types, no plans."""

from __future__ import annotations

import torch
from torch import nn

from paceline.program.build import build
from paceline.train.data import Batch, Source
from paceline.train.data.order import Indices
from paceline.train.recipe import Recipe


def build_module(recipe: Recipe) -> nn.Module:
    """Call the model's factory with all global generators at the recipe's seed, and return the module it makes.

    Raises:
        RecipeError: the factory fails, refuses its arguments, or returns something else than `(module, batch)`.
    """
    module, _ = build(recipe.model.factory, recipe.model.args, recipe.seed)
    return module.double() if recipe.precision == "float64" else module


class InFloat64(Source):
    """A source with its floating-point tensors in float64."""

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self.block = source.block
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: Indices) -> Batch:
        """See `Source.batch`."""
        batch = self._source.batch(indices)
        if isinstance(batch, dict):
            return {key: _widened(tensor) for key, tensor in batch.items()}
        return tuple(map(_widened, batch))


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
