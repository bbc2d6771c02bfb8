"""`paceline plan`: what a plan amounts to, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import JsonFile, Pins, Sets, assignments
from paceline.cli.output import write_json
from paceline.errors import RecipeError
from paceline.plan import Mesh, Pin, Plan

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
    sets: Sets = None,
    pins: Pins = None,
    json_file: JsonFile = None,
) -> None:
    """Say what a plan amounts to: where tensors live, what ranks hold and exchange. Nothing runs.

    The step is captured and placed in this process, as `paceline train` would, and told in the names of your modules;
    repeated blocks are told once. docs/placement.md says how to read it, and how to place parameters by hand.

        paceline plan recipes/gpt-stdlib.yaml --mesh fsdp=2
        paceline plan --model my_model.py:build --mesh dp=2,fsdp=2 --explain
    """
    if (recipe is None) == (model is None):
        raise RecipeError("name what to plan: either a RECIPE or --model FACTORY.")
    if mesh is None:
        raise RecipeError("the search over meshes is not there yet; name the mesh to explain, as in --mesh fsdp=2.")
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    with console.status("importing") as status:
        if recipe is not None:
            from paceline.train.explain import explain_recipe
            from paceline.train.recipe import load_recipe

            loaded = load_recipe(recipe, assignments(sets, mesh, pins=pins))
            chosen = loaded.plan() if zero_stage is None else loaded.plan().with_(zero_stage=zero_stage)
            told = explain_recipe(loaded, chosen, tell=status.update)
        else:
            from paceline.planner.explain import explain_factory

            assert model is not None
            stage = Plan.zero_stage if zero_stage is None else zero_stage
            chosen = Plan(Mesh.parse(mesh), zero_stage=stage, pins=tuple(map(Pin.parse, pins or [])))
            told = explain_factory(model, chosen, tell=status.update)

    from paceline.planner.report import to_json
    from paceline.planner.tables import details, summary

    if str(json_file) != "-":  # else the object has the standard output to itself
        summary(told, console)
        if explain:
            details(told, console)
    if json_file is not None:
        write_json(to_json(told), json_file)
