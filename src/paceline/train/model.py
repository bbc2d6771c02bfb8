"""The user's module, built the same on every rank from a recipe. Knows factories and number types, no plans."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import RecipeError
from paceline.program.factory import load_factory, user_line
from paceline.train.data import Batch, Source
from paceline.train.data.order import Indices
from paceline.train.recipe import Recipe


def build_module(recipe: Recipe) -> nn.Module:
    """Call the model's factory with all global generators at the recipe's seed, and return the module it makes.

    Raises:
        RecipeError: the factory fails, refuses its arguments, or returns something else than `(module, batch)`.
    """
    factory, arguments = recipe.model.factory, recipe.model.args
    build = load_factory(factory, Path.cwd())
    random.seed(recipe.seed)
    np.random.seed(recipe.seed % 2**32)
    torch.manual_seed(recipe.seed)
    try:
        made: Any = build(**arguments)
    except Exception as error:  # the user's code may raise anything; the message keeps their line
        raise RecipeError(
            f"the factory '{factory}' failed with the arguments {arguments}: {type(error).__name__}: {error}\n"
            f"  {user_line(error)}"
        ) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise RecipeError(
            f"the factory '{factory}' returned a {type(made).__name__}; it must return a pair (module, batch), where "
            "module(*batch) or module(**batch) gives a scalar loss or an object with '.loss'."
        )
    module: nn.Module = made[0]
    return module.double() if recipe.precision == "float64" else module


class InFloat64(Source):
    """A source with its floating-point tensors in float64."""

    def __init__(self, source: Source) -> None:
        self.name = source.name
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
