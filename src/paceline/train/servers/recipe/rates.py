"""The learning rate of a recipe with servers, step by step: numbers that all of its processes share."""

from __future__ import annotations

import math

import torch
from torch import nn

from paceline.errors import RecipeError
from paceline.train.optim import build_optimizer, build_schedule, own_schedule, rates_of
from paceline.train.recipe import Recipe
from paceline.train.servers.recipe.rules import ONLY_HERE


def factors_of(recipe: Recipe, steps: int) -> tuple[float, ...]:
    """Return how many times its `lr` the learning rate of a rule is in each step; nothing where it is always that.

    Args:
        recipe: with a section `server`.
        steps: of the run.

    Raises:
        RecipeError: the schedule changes more than the learning rate, or gives tables of another rate other factors.
    """
    schedule, server = recipe.schedule, recipe.server
    if schedule.name == "constant" and not schedule.warmup:
        return ()
    own = [table.optimizer.lr for table in server.tables.values() if table.optimizer] if server is not None else []
    found = {lr: _factors(recipe, lr, steps) for lr in dict.fromkeys([recipe.optimizer.lr, *own])}
    factors = found[recipe.optimizer.lr]
    for lr, others in found.items():
        pairs = zip(factors, others, strict=True)
        if not all(math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) for one, other in pairs):
            raise RecipeError(
                f"the schedule {schedule.name} says what the learning rate is, not how many times the given one, so "
                f"tables with lr {lr:g} of their own would lose it: take linear or cosine."
            )
    return tuple(factors)


def _factors(recipe: Recipe, lr: float, steps: int) -> list[float]:
    schedule, section = recipe.schedule, recipe.optimizer
    factor = own_schedule(
        schedule.name, steps=steps, warmup=schedule.warmup, floor=schedule.floor, options=schedule.options
    )
    if factor is not None:  # a million steps of a scheduler take a minute
        return list(map(factor, range(steps)))
    trifle = nn.Linear(1, 1)
    if section.name in ONLY_HERE:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(trifle.parameters(), lr=lr)
    else:
        optimizer = build_optimizer(trifle, section.name, {**section.options, "lr": lr})
    made = build_schedule(
        optimizer,
        schedule.name,
        steps=steps,
        warmup=schedule.warmup,
        floor=schedule.floor,
        options=schedule.options,
    )
    return [rate / lr for rate in rates_of(optimizer, made, steps)]
