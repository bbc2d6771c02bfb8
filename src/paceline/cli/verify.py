"""`paceline verify`: is the plan equal to the unmodified module run serially?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import (
    Backend,
    BackendOption,
    Boundaries,
    Chunks,
    JsonFile,
    Launch,
    LaunchOption,
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
from paceline.plan import Pin, Plan


class Dtype(StrEnum):
    """Type that both sides compute in."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def verify(
    recipe: Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="Recipe whose model is verified.")] = None,
    model: Annotated[str | None, typer.Option(metavar="FACTORY", help="Your own module instead of a recipe's.")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="MESH", help="Ranks, such as fsdp=2; default: the recipe's.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps after which parameters are compared.")] = 2,
    dtype: Annotated[Dtype, typer.Option(help="float64 must agree within 1e-9, float32 within 1e-4.")] = Dtype.FLOAT64,
    zero_stage: Annotated[
        int | None, typer.Option(min=2, max=3, help="What fsdp does between forward and backward.")
    ] = None,
    sets: Sets = None,
    pins: Pins = None,
    schedule: Schedule = None,
    micro_batches: MicroBatches = None,
    chunks: Chunks = None,
    boundaries: Boundaries = None,
    recompute: RecomputeOption = None,
    launch: LaunchOption = None,
    backend: BackendOption = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Do a run with parameter servers again from its logs, and compare."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare the plan with the unmodified module, run serially on the same samples.

    Loss, every parameter's gradient, buffers, and parameters after some optimizer steps must be equal within the
    tolerance of the type. Exits with 0 if they are and with 1 if not; then the first difference along the program is
    named.

        paceline verify recipes/gpt-stdlib.yaml --mesh dp=2,fsdp=2
        paceline verify --model my_model.py:build --mesh fsdp=2 --json equal.json
        paceline verify --model my_model.py:build --mesh dp=2,pp=2 --schedule zb-h1 --micro-batches 4

    A run with parameter servers is done again from its logs, one update after the other; what comes out must be what
    servers wrote at its end, bit for bit:

        paceline verify --replay runs/ctr-1
    """
    if replay is not None:
        if recipe is not None or model is not None:
            raise RecipeError("--replay takes the recipe from the run's directory: name no RECIPE and no --model.")
        _verify_replay(replay, json_file)
        return
    if (recipe is None) == (model is None):
        raise RecipeError("name what to verify: either a RECIPE or --model FACTORY.")

    arguments: dict[str, Any] = {}
    pinned = tuple(map(Pin.parse, pins or []))
    flow = Plan.pipeline
    if recipe is not None:
        from paceline.train.recipe import load_recipe

        loaded = load_recipe(recipe, assignments(sets, mesh, launch, backend, pins))
        model, arguments = loaded.model.factory, loaded.model.args
        mesh = str(loaded.mesh)
        zero_stage = zero_stage or loaded.plan().zero_stage
        pinned = loaded.plan().pins
        recompute = recompute or loaded.plan().recompute
        flow = loaded.plan().pipeline
        micro_batches = micro_batches or loaded.train.micro_batches
        backend = Backend(loaded.backend)
    elif mesh is None:
        raise RecipeError("name the mesh to verify on, as in --mesh fsdp=2.")
    assert model is not None and mesh is not None

    from rich.console import Console

    from paceline.verify.run import verify as verify_plan

    console = Console()
    with console.status("importing") as status:
        report = verify_plan(
            model,
            mesh,
            arguments=arguments,
            steps=steps,
            dtype=dtype.value,
            launch=(launch or Launch.PROCESSES).value,
            backend=(backend or Backend.AUTO).value,
            zero_stage=zero_stage or Plan.zero_stage,
            pins=pinned,
            pipeline=pipeline_with(flow, schedule, micro_batches, chunks, boundaries),
            recompute=(recompute or Plan.recompute).value,
            tell=status.update,
        )
    report.print(console)
    if json_file is not None:
        write_json(report.to_json(), json_file)
    if not report.equal:
        raise typer.Exit(1)


def _verify_replay(run_dir: Path, json_file: Path | None) -> None:
    from rich.console import Console

    from paceline.verify.server_replay import verify_replay

    console = Console()
    with console.status("replaying"):
        report = verify_replay(run_dir)
    console.print(report.text, highlight=False, soft_wrap=True)
    if json_file is not None:
        write_json(report.to_json(), json_file)
    if not report.equal:
        raise typer.Exit(1)
