"""`paceline plan`: what a plan amounts to, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import plan_stages
from paceline.cli.options import (
    Boundaries,
    Chunks,
    JsonFile,
    MicroBatches,
    Pins,
    RecomputeOption,
    Schedule,
    Sets,
    assignments,
    pipeline_with,
)
from paceline.cli.output import write_json
from paceline.errors import RecipeError
from paceline.plan import Axis, Mesh, Pin, Plan

_WIDTH = 100


def plan(
    recipe: Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="Recipe whose step is planned.")] = None,
    model: Annotated[str | None, typer.Option(metavar="FACTORY", help="Your own module instead of a recipe's.")] = None,
    mesh: Annotated[str | None, typer.Option(metavar="MESH", help="Ranks, such as fsdp=2 or dp=2,tp=2.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also list parameters, activations and all that moves.")
    ] = False,
    zero_stage: Annotated[
        int | None, typer.Option(min=2, max=3, help="What fsdp does between forward and backward.")
    ] = None,
    schedule: Schedule = None,
    micro_batches: MicroBatches = None,
    chunks: Chunks = None,
    boundaries: Boundaries = None,
    recompute: RecomputeOption = None,
    partition: Annotated[
        bool, typer.Option("--partition", help="Find stages for pp, slow ones on several ranks, as PipeDream does.")
    ] = False,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Between two ranks, for --partition; else as measured here.")
    ] = None,
    sets: Sets = None,
    pins: Pins = None,
    json_file: JsonFile = None,
) -> None:
    """Say what a plan amounts to: where tensors live, what ranks hold and exchange. Nothing runs.

    The step is captured and placed in this process, as `paceline train` would, and told in the names of your modules;
    repeated blocks are told once. docs/placement.md says how to read it, and how to place parameters by hand.

        paceline plan recipes/gpt-stdlib.yaml --mesh fsdp=2
        paceline plan --model my_model.py:build --mesh dp=2,fsdp=2 --explain
        paceline plan recipes/gpt-stdlib.yaml --mesh dp=2,pp=2
        paceline plan recipes/gpt-stdlib.yaml --mesh pp=4 --partition
    """
    if (recipe is None) == (model is None):
        raise RecipeError("name what to plan: either a RECIPE or --model FACTORY.")
    if mesh is None:
        raise RecipeError("the search over meshes is not there yet; name the mesh to explain, as in --mesh fsdp=2.")
    if bandwidth is not None and not partition:
        raise RecipeError("--bandwidth is for --partition; add it, or leave out --bandwidth.")
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    loaded = None
    if recipe is not None:
        from paceline.train.recipe import load_recipe

        pieces = [] if micro_batches is None else [f"train.micro_batches={micro_batches}"]
        loaded = load_recipe(recipe, [*assignments(sets, mesh, pins=pins), *pieces])
        chosen, micro_batches = loaded.plan(), None
    else:
        chosen = Plan(Mesh.parse(mesh), pins=tuple(map(Pin.parse, pins or [])))
    chosen = chosen.with_(
        zero_stage=zero_stage or chosen.zero_stage,
        recompute=recompute or chosen.recompute,
        pipeline=pipeline_with(chosen.pipeline, schedule, micro_batches, chunks, boundaries),
    )
    with console.status("importing") as status:
        if partition or Axis.PP.value in chosen.mesh.names:
            made = plan_stages.flow(loaded, model, chosen, status.update)
            if partition:
                plan_stages.partition(
                    made, chosen, console, bandwidth=bandwidth, json_file=json_file, tell=status.update
                )
            else:
                plan_stages.stages(made, chosen, console, details=explain, json_file=json_file, tell=status.update)
            return
        if loaded is not None:
            from paceline.train.explain import explain_recipe

            told = explain_recipe(loaded, chosen, tell=status.update)
        else:
            from paceline.planner.explain import explain_factory

            assert model is not None
            told = explain_factory(model, chosen, tell=status.update)

    from paceline.planner.report import to_json
    from paceline.planner.tables import details, summary

    if str(json_file) != "-":  # else the object has the standard output to itself
        summary(told, console)
        if explain:
            details(told, console)
    if json_file is not None:
        write_json(to_json(told), json_file)
