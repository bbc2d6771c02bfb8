"""`paceline plan --cluster`: the search over plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.output import write_json
from paceline.errors import RecipeError
from paceline.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cluster.cluster import Cluster
    from paceline.planner.search.ranking import Ranking
    from paceline.simulator.workload import Workload
    from paceline.train.recipe import Recipe

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What is asked for on the command line.

    Attributes:
        cluster: the name of one, or its file.
        devices: how many to use; all, where it is None.
        batch: samples of a step; those of the recipe or the factory, where it is None.
        memory_bytes: what a rank may hold; what a device has, where it is None.
        axes: that plans may use, `dp,tp`; all, where it is None.
        autocast: whether a factory's module runs under autocast to bfloat16.
        top: how many plans to show.
        out: where to write the best plan.
    """

    cluster: str
    devices: int | None
    batch: int | None
    memory_bytes: int | None
    axes: str | None
    autocast: bool
    top: int
    out: Path | None


def search(recipe: Recipe | None, model: str | None, wish: Wish, console: Console, json_file: Path | None) -> None:
    """Search, tell what was found, and write the best plan.

    Raises:
        Exit: nothing fits; its code is 1.
    """
    with console.status("importing") as status:
        found = _found(recipe, model, wish, status.update)
    from paceline.planner.search.report import to_json
    from paceline.planner.search.tables import print_ranking

    base = Plan() if recipe is None else recipe.plan()
    if str(json_file) != "-":
        print_ranking(found, console, top=wish.top)
    if json_file is not None:
        write_json(to_json(found, top=wish.top, base=base), json_file)
    if not found.plans:
        raise typer.Exit(1)
    if wish.out is not None:
        _write(found, base, wish.out)
        if str(json_file) != "-":
            console.print(f"\nthe best plan: {wish.out}; train by it with --plan {wish.out}", highlight=False)


def _found(recipe: Recipe | None, model: str | None, wish: Wish, tell: Tell) -> Ranking:
    from paceline.cluster.files import load
    from paceline.planner.search.ranking import search as search_plans

    cluster = load(wish.cluster)
    if wish.devices is not None:
        cluster = cluster.of(wish.devices)
    workload, samples = _workload(recipe, model, wish, cluster, tell)
    return search_plans(
        workload,
        cluster,
        batch=samples if wish.batch is None else wish.batch,
        devices=wish.devices,
        memory_bytes=wish.memory_bytes,
        axes=None if wish.axes is None else [axis.strip() for axis in wish.axes.split(",")],
        tell=tell,
    )


def _workload(
    recipe: Recipe | None, model: str | None, wish: Wish, cluster: Cluster, tell: Tell
) -> tuple[Workload, int]:
    """Return what a step consists of, divided as the cluster's devices would, and of how many samples it is."""
    from paceline.planner.machine_costs import costs_on

    costs = costs_on(cluster)
    if recipe is not None:
        from paceline.train.explain import workload_of_recipe

        return workload_of_recipe(recipe, costs=costs, tell=tell), recipe.train.batch
    import torch

    from paceline.planner.workload import workload_of
    from paceline.program.build import batch_size, checked_batch
    from paceline.program.without_data import build_without_data

    assert model is not None
    tell("building the module, without data")
    module, made = build_without_data(model, {}, seed=0, tell=tell)
    batch = checked_batch(made)
    samples = batch_size(batch)
    assert samples is not None
    autocast = torch.bfloat16 if wish.autocast else None
    name = model.rpartition(":")[2]
    return workload_of(module, batch, autocast=autocast, costs=costs, name=name, tell=tell), samples


def _write(found: Ranking, base: Plan, file: Path) -> None:
    from paceline.planner.plan_file import PlanFile

    best = found.plans[0]
    plan = PlanFile(best.plan(base), found.asked.batch, best.number("micro_batches"))
    expected = {
        "cluster": found.asked.cluster.name,
        "step_s": best.step_s,
        "step_s_error": best.step_s_error,
        "tokens_per_s": best.tokens_per_s,
        "memory_bytes": best.memory_bytes,
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(plan.to_yaml({"expected": expected}), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"-o {file} cannot be written: {error}.") from error
