"""`paceline plan` for meshes with a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.output import write_json
from paceline.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.planner.flow import Flow
    from paceline.train.recipe import Recipe

Tell = Callable[[str], None]
_GIGA = 1e9


def flow(recipe: Recipe | None, model: str | None, plan: Plan, tell: Tell) -> Flow:
    """Return what flows through a pipeline: micro-batches of a recipe, or pieces of a factory's batch."""
    if recipe is not None:
        from paceline.train.explain import flow_of_recipe

        return flow_of_recipe(recipe, tell=tell)
    from paceline.planner.flow import flow_of
    from paceline.program.build import build, checked_batch

    assert model is not None
    tell("building the module")
    module, batch = build(model, {}, seed=0)
    return flow_of(module, checked_batch(batch), plan)


def stages(made: Flow, plan: Plan, console: Console, *, details: bool, json_file: Path | None, tell: Tell) -> None:
    """Tell the stages of a plan."""
    from paceline.planner.stages import tell_stages
    from paceline.planner.stages_report import print_stages, stages_to_json

    told = tell_stages(made, plan, tell=tell)
    if str(json_file) != "-":
        print_stages(told, console, details=details)
    if json_file is not None:
        write_json({"plans": [stages_to_json(told)]}, json_file)


def partition(
    made: Flow, plan: Plan, console: Console, *, bandwidth: float | None, json_file: Path | None, tell: Tell
) -> None:
    """Tell PipeDream's partition; `bandwidth` is in GB/s."""
    from paceline.planner.partitioned import find_partition
    from paceline.planner.stages_report import partition_to_json, print_partition

    told = find_partition(made, plan, bandwidth=None if bandwidth is None else bandwidth * _GIGA, tell=tell)
    if str(json_file) != "-":
        print_partition(told, console)
    if json_file is not None:
        write_json({"partition": partition_to_json(told)}, json_file)
