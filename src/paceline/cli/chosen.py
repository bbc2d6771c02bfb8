"""The plan that verbs which run nothing are asked about: of a recipe or a factory, with what options change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import assignments, pipeline_with
from paceline.plan import Mesh, Pin, Plan, Recompute

if TYPE_CHECKING:
    from paceline.train.recipe import Recipe

Factory = Annotated[str | None, typer.Option(metavar="FACTORY", help="Your own module instead of a recipe's.")]
ZeroStage = Annotated[int | None, typer.Option(min=2, max=3, help="What fsdp does between forward and backward.")]


@dataclass(frozen=True)
class Changes:
    """What options change of a plan; None changes nothing."""

    mesh: str | None
    zero_stage: int | None
    recompute: Recompute | None
    schedule: str | None
    micro_batches: int | None
    chunks: int | None
    boundaries: str | None
    sets: list[str] | None
    pins: list[str] | None


def chosen_plan(recipe: Path | None, changes: Changes) -> tuple[Recipe | None, Plan]:
    """Return the recipe with what was set, if there is one, and the plan.

    Raises:
        RecipeError, PlanError: an option or the recipe cannot be used.
    """
    loaded, micro_batches = None, changes.micro_batches
    if recipe is not None:
        from paceline.train.recipe import load_recipe

        pieces = [] if micro_batches is None else [f"train.micro_batches={micro_batches}"]
        loaded = load_recipe(recipe, [*assignments(changes.sets, changes.mesh, pins=changes.pins), *pieces])
        plan, micro_batches = loaded.plan(), None  # a recipe's batch comes in micro-batches already
    else:
        plan = Plan(Mesh.parse(changes.mesh or ""), pins=tuple(map(Pin.parse, changes.pins or [])))
    return loaded, plan.with_(
        zero_stage=changes.zero_stage or plan.zero_stage,
        recompute=changes.recompute or plan.recompute,
        pipeline=pipeline_with(plan.pipeline, changes.schedule, micro_batches, changes.chunks, changes.boundaries),
    )
