"""From a recipe and its module to the job that servers keep, and to its terms."""

from __future__ import annotations

from torch import nn

from paceline.errors import ExchangeError, nearest
from paceline.exchange.job import DenseTable, Job, Rule, SparseTable, Table
from paceline.exchange.rates import Rates
from paceline.exchange.table.rules import RULES
from paceline.exchange.terms import Terms
from paceline.train.recipe import Recipe
from paceline.train.servers.recipe.checks import applies_means
from paceline.train.servers.recipe.rates import factors_of
from paceline.train.servers.recipe.rules import rule_of
from paceline.train.servers.recipe.section import ServerSection, TableSection, read_initializer

_AVERAGED = Rule("sgd", {"lr": 1.0})
"""Differences are pushed as gradients are: at a rate of 1 their mean is subtracted."""


def job_of(recipe: Recipe, module: nn.Module, steps: int) -> Job:
    """Return what servers keep for a recipe: of one group, where there are groups.

    Args:
        recipe: with a section `server`.
        module: the user's; a table for each of its parameters that require a gradient.
        steps: of the run, over which learning rates change.

    Raises:
        ExchangeError: a sparse table is no parameter of the module, or nothing is to be trained.
        RecipeError: servers cannot follow the schedule of the learning rate.
    """
    server = _section(recipe)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name in server.tables:
        if name not in parameters:
            raise ExchangeError(
                f"server.tables names '{name}', which is no parameter of the module that requires a gradient."
                f"{nearest(name, parameters)} It has: {', '.join(parameters)}."
            )
    if not parameters:
        raise ExchangeError("there is nothing for servers to keep: no parameter of the module requires a gradient.")
    tables = tuple(_table(recipe, server, name, parameter) for name, parameter in parameters.items())
    return Job(
        tables,
        shards=server.shards,
        pieces=server.tasks_of_a_step // groups_of(server),
        replication=server.replication,
        seed=recipe.seed,
        damp_stale=server.damp_stale,
        clip=recipe.train.clip if applies_means(recipe) else None,
        rates=Rates.of(factors_of(recipe, steps) if server.average_every is None else ()),  # else the workers' own
    )


def groups_of(server: ServerSection) -> int:
    """Number of groups of workers that have servers of their own."""
    return server.groups if server.deployment == "groups" else 1


def _section(recipe: Recipe) -> ServerSection:
    if recipe.server is None:
        raise ExchangeError("the recipe has no section `server`.")
    return recipe.server


def _table(recipe: Recipe, server: ServerSection, name: str, parameter: nn.Parameter) -> Table:
    dtype = str(parameter.dtype).removeprefix("torch.")
    optimizer = recipe.optimizer
    section: TableSection | None = server.tables.get(name)
    if section is not None:
        own = section.optimizer
        rule = (
            rule_of(optimizer.name, optimizer.options)
            if own is None
            else rule_of(own.name, {"lr": own.lr, **own.options})
        )
        width = parameter.shape[1] if parameter.dim() == 2 else 1
        return SparseTable(name, width, dtype, rule, server.sparse_consistency, read_initializer(section.initializer))
    if server.average_every is not None:
        rule = _AVERAGED
    else:
        rule = rule_of(optimizer.name, optimizer.options, decays=parameter.dim() > 1 or optimizer.decay_vectors)
        if not RULES[rule.name].dense:
            raise ExchangeError(
                f"optimizer.name is {optimizer.name}, which is for sparse tables, and '{name}' is none: choose "
                f"another, and give tables theirs, as in server.tables={{PARAMETER: {{keys: KEY, optimizer: {{name: "
                f"{optimizer.name}, lr: {optimizer.lr}}}}}}}."
            )
    return DenseTable(name, tuple(parameter.shape), dtype, rule, server.dense_consistency)


def steps_of(recipe: Recipe, samples: int) -> int:
    """Return the steps of a run. samples: of the training data."""
    settings = recipe.train
    every = _section(recipe).average_every or 1
    steps = settings.steps if settings.steps is not None else (settings.epochs or 1) * -(-samples // settings.batch)
    return steps // every * every


def terms_of(recipe: Recipe, steps: int) -> Terms:
    """Return how the job goes, of one group where there are groups.

    Args:
        recipe: with a section `server`.
        steps: of the run.
    """
    server, settings = _section(recipe), recipe.train
    groups, every = groups_of(server), server.average_every or 1
    pieces = server.tasks_of_a_step // groups
    workers = server.workers // groups
    consistency = server.dense_consistency
    waits = consistency.bound is not None or (bool(server.tables) and server.sparse_consistency.bound is not None)
    return Terms(
        tasks=steps // every * pieces,
        servers=workers if server.deployment == "colocated" else server.servers,
        workers=max(1, server.minimum // groups) + (groups > 1),  # with the bridge, which is a member too
        ahead=2 if waits else consistency.push_every + 4,  # one of them is looked for while another is computed
        evaluate_every=_clocks(settings.validation.every if settings.validation is not None else 0, every),
        snapshot_every=_clocks(recipe.checkpoint.every or 0, every),
        kept_snapshots=recipe.checkpoint.keep,
        lease_s=server.lease_s,
        outlived=server.is_hogwild,
    )


def _clocks(steps: int, every: int) -> int:
    """Rounds of `every` steps that take at least so many; 0 for none."""
    return -(-steps // every)
