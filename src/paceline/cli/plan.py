"""`paceline plan`: what a plan amounts to, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import plan_search, plan_stages
from paceline.cli.chosen import Changes, Factory, ZeroStage, chosen_plan
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
)
from paceline.cli.output import write_json
from paceline.errors import RecipeError
from paceline.plan import Axis

if TYPE_CHECKING:
    from paceline.train.recipe import Recipe

_WIDTH = 100


def plan(
    recipe: Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="Recipe whose step is planned.")] = None,
    model: Factory = None,
    mesh: Annotated[str | None, typer.Option(metavar="MESH", help="Ranks, such as fsdp=2 or dp=2,tp=2.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also list parameters, activations and all that moves.")
    ] = False,
    zero_stage: ZeroStage = None,
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
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Search all plans for this cluster, instead of --mesh.")
    ] = None,
    devices: Annotated[int | None, typer.Option(metavar="N", help="Use so many of the cluster; default: all.")] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="N", help="Samples of a step; default: the recipe's, or the factory's.")
    ] = None,
    memory_bytes: Annotated[
        int | None, typer.Option(metavar="BYTES", help="What a rank may hold; default: what the device has.")
    ] = None,
    axes: Annotated[
        str | None, typer.Option(metavar="LIST", help="Axes that the search may use, as in dp,tp; default: all.")
    ] = None,
    autocast: Annotated[
        bool, typer.Option("--autocast", help="Run a FACTORY's module under autocast to bfloat16.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="How many plans the search shows.")] = 5,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the best plan, for train --plan.")
    ] = None,
    sets: Sets = None,
    pins: Pins = None,
    json_file: JsonFile = None,
) -> None:
    """Say what a plan amounts to, or with --cluster search for the best one. Nothing runs.

    With --mesh the step is captured and placed in this process, as `paceline train` would, and told in the names of
    your modules; repeated blocks are told once. docs/placement.md says how to read it, and how to place parameters by
    hand. With --cluster all layouts are estimated, and the best ones simulated; see docs/planning.md.

        paceline plan recipes/gpt-stdlib.yaml --cluster laptop --devices 2 -o plan.yaml
        paceline plan --model my_model.py:build --cluster dgx-h100 --devices 64 --batch 512
        paceline plan recipes/gpt-stdlib.yaml --mesh fsdp=2
        paceline plan --model my_model.py:build --mesh dp=2,fsdp=2 --explain
        paceline plan recipes/gpt-stdlib.yaml --mesh dp=2,pp=2
        paceline plan recipes/gpt-stdlib.yaml --mesh pp=4 --partition
    """
    if (recipe is None) == (model is None):
        raise RecipeError("name what to plan: either a RECIPE or --model FACTORY.")
    if (mesh is None) == (cluster is None):
        from paceline.cluster.files import names

        raise RecipeError(
            "name either the mesh to explain, as in --mesh fsdp=2, or the cluster to search plans for, as in --cluster "
            f"laptop. There are {', '.join(names())}; a file describes another."
        )
    if bandwidth is not None and not partition:
        raise RecipeError("--bandwidth is for --partition; add it, or leave out --bandwidth.")
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    if cluster is not None:
        wish = plan_search.Wish(cluster, devices, batch, memory_bytes, axes, autocast, top, out)
        plan_search.search(_recipe(recipe, sets, batch), model, wish, console, json_file)
        return
    assert mesh is not None
    loaded, chosen = chosen_plan(
        recipe, Changes(mesh, zero_stage, recompute, schedule, micro_batches, chunks, boundaries, sets, pins)
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


def _recipe(recipe: Path | None, sets: list[str] | None, batch: int | None) -> Recipe | None:
    """Return a recipe as a search takes it: for one rank, with its batch in one piece."""
    if recipe is None:
        return None
    from paceline.train.recipe import load_recipe

    sizes = [] if batch is None else [f"train.batch={batch}"]
    return load_recipe(recipe, [*assignments(sets, "serial"), "train.micro_batches=1", *sizes])
