"""What the plan of a recipe amounts to, for the step that `train` would capture; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from paceline.cluster.cluster import Cluster
from paceline.placement.costs import Costs
from paceline.plan import Plan
from paceline.planner.dividing import ACCELERATOR
from paceline.planner.explain import explain
from paceline.planner.explanation import Explanation
from paceline.planner.flow import Flow
from paceline.planner.simulated import simulate_flow
from paceline.planner.workload import workload_of
from paceline.program.without_data import build_without_data
from paceline.simulator.placed.simulation import Simulation
from paceline.simulator.placed.step import Circumstances
from paceline.simulator.workload import Workload
from paceline.train.data import Batch, Loader, open_source
from paceline.train.model import InFloat64, build_module
from paceline.train.optim import build_optimizer, states_per_element
from paceline.train.recipe import Recipe


def explain_recipe(
    recipe: Recipe, plan: Plan | None = None, *, tell: Callable[[str], None] = lambda _: None
) -> Explanation:
    """Return what a plan amounts to for one micro-batch of a recipe.

    Args:
        recipe: its module, data, precision and optimizer.
        plan: by default the recipe's own.
        tell: is told what is being done, in a few words.

    Raises:
        RecipeError: the factory cannot be used.
        DataError: the data cannot be read.
        CaptureError, PlanError, PlacementError: see `planner.explain`.
    """
    tell("reading the data and building the module")
    module, batch = _example(recipe)
    return explain(
        module,
        batch,
        recipe.plan() if plan is None else plan,
        autocast=_autocast(recipe),
        optimizer=(recipe.optimizer.name, states_per_element(recipe.optimizer.name, recipe.optimizer.options)),
        tell=tell,
    )


def workload_of_recipe(
    recipe: Recipe, *, costs: Costs = ACCELERATOR, tell: Callable[[str], None] = lambda _: None
) -> Workload:
    """Return what a training step of a recipe consists of; nothing is allocated for its module where that is possible.

    Args:
        recipe: what is trained.
        costs: by which tensors are split; see `planner.workload`.
        tell: is told what is being done, in a few words.

    Raises:
        RecipeError: the factory cannot be used.
        DataError: the data cannot be read.
        CaptureError: see `planner.workload`.
    """
    tell("reading the data and building the module, without data")
    module, _ = build_without_data(recipe.model.factory, recipe.model.args, recipe.seed, tell=tell)
    if recipe.precision == "float64":
        module = module.double()
    return workload_of(
        module,
        _batch(recipe),
        autocast=_autocast(recipe),
        costs=costs,
        states=states_per_element(recipe.optimizer.name, recipe.optimizer.options),
        name=recipe.name,
        tell=tell,
    )


def flow_of_recipe(recipe: Recipe, *, tell: Callable[[str], None] = lambda _: None) -> Flow:
    """Return what flows through the pipeline of a recipe.

    Raises:
        RecipeError: the factory cannot be used.
        DataError: the data cannot be read.
    """
    tell("reading the data and building the module")
    module, batch = _example(recipe)
    return Flow(module, batch, recipe.train.micro_batches, _autocast(recipe))


def simulate_recipe(
    recipe: Recipe,
    plan: Plan | None = None,
    *,
    cluster: Cluster | None = None,
    slowness: Mapping[int, float] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Simulation:
    """Return what a step of a recipe comes to in virtual time.

    Args:
        recipe: its module, data, precision, micro-batches and optimizer.
        plan: by default the recipe's own.
        cluster: see `planner.simulated.simulate`.
        slowness: by how much single ranks compute slower than the others.
        tell: is told what is being done, in a few words.

    Raises:
        RecipeError: the factory cannot be used.
        DataError: the data cannot be read.
        CaptureError, PlanError, PlacementError, ScheduleError, ClusterError: see `planner.simulated.simulate`.
    """
    given = replace(circumstances_of(recipe), slowness=slowness or {})
    flow = flow_of_recipe(recipe, tell=tell)
    return simulate_flow(flow, recipe.plan() if plan is None else plan, cluster=cluster, given=given, tell=tell)


def circumstances_of(recipe: Recipe) -> Circumstances:
    """Return what a step of a recipe depends on beside its program and its plan."""
    return Circumstances(
        micro_batches=recipe.train.micro_batches,
        optimizer=lambda module: build_optimizer(
            module, recipe.optimizer.name, recipe.optimizer.options, decay_vectors=recipe.optimizer.decay_vectors
        ),
        clips=recipe.train.clip is not None,
    )


def _autocast(recipe: Recipe) -> torch.dtype | None:
    return torch.bfloat16 if recipe.precision == "bfloat16" else None


def _example(recipe: Recipe) -> tuple[nn.Module, Batch]:
    """Return the module, and its first micro-batch over all ranks."""
    return build_module(recipe), _batch(recipe)


def _batch(recipe: Recipe) -> Batch:
    source, _ = open_source(recipe.data)
    if recipe.precision == "float64":
        source = InFloat64(source)
    return Loader(source, recipe.train.batch, recipe.train.micro_batches).example()
