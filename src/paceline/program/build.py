"""Calls a factory: the user's module and an example batch, the same wherever it is called."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from paceline.errors import RecipeError
from paceline.program.capture import Batch
from paceline.program.factory import load_factory, user_line

Factory = Callable[..., tuple[nn.Module, Any]]


def build(factory: str | Factory, arguments: Mapping[str, Any], seed: int) -> tuple[nn.Module, Any]:
    """Call a factory with all global generators at `seed`, and return the module and the batch that it makes.

    Args:
        factory: the callable, or its name as `load_factory` reads it, relative to the working directory.
        arguments: its keyword arguments.
        seed: of Python, NumPy and PyTorch.

    Raises:
        RecipeError: the factory cannot be found, fails, or returns something else than a pair (module, batch).
    """
    make = load_factory(factory, Path.cwd()) if isinstance(factory, str) else factory
    name = factory if isinstance(factory, str) else getattr(factory, "__qualname__", repr(factory))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        made: Any = make(**arguments)
    except Exception as error:  # the user's code may raise anything; the message keeps their line
        raise RecipeError(
            f"the factory '{name}' failed with the arguments {dict(arguments)}: {type(error).__name__}: {error}\n"
            f"  {user_line(error)}"
        ) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise RecipeError(
            f"the factory '{name}' returned a {type(made).__name__}; it must return a pair (module, batch), where "
            "module(*batch) or module(**batch) gives a scalar loss or an object with '.loss'."
        )
    return made[0], made[1]


def checked_batch(batch: Any) -> Batch:
    """Return the batch that a factory made, a list as a tuple.

    Raises:
        RecipeError: a module cannot be called with it, or there are no samples in it.
    """
    if isinstance(batch, list):
        batch = tuple(batch)
    if not isinstance(batch, (tuple, Mapping)) or batch_size(batch) is None:
        raise RecipeError(
            f"the factory's batch is a {type(batch).__name__}; it must be a tuple of positional or a dictionary of "
            "keyword arguments with a tensor among them, whose first dimension is the samples."
        )
    return batch


def batch_size(batch: Any) -> int | None:
    """Return the first dimension of the first tensor that has one."""
    shapes = (leaf.shape for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)
    return next((int(shape[0]) for shape in shapes), None)
