"""`paceline simulate`: a step in virtual time, on this machine or on one that is described."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
)
from paceline.cli.output import write_json
from paceline.errors import PlanError, RecipeError
from paceline.plan import Mesh, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.cluster.cluster import Cluster
    from paceline.simulator.placed.simulation import Simulation
    from paceline.train.recipe import Recipe

_WIDTH = 120


def simulate(
    recipe: Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="Recipe whose step is simulated.")] = None,
    model: Factory = None,
    mesh: Annotated[str | None, typer.Option(metavar="MESH", help="Ranks, such as fsdp=2 or dp=2,pp=2.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Where; by default this machine as calibrate found it, else laptop."),
    ] = None,
    zero_stage: ZeroStage = None,
    schedule: Schedule = None,
    micro_batches: MicroBatches = None,
    chunks: Chunks = None,
    boundaries: Boundaries = None,
    recompute: RecomputeOption = None,
    slow: Annotated[
        list[str] | None,
        typer.Option("--slow", metavar="RANK=FACTOR", help="A rank that computes slower, as in 3=1.5; repeatable."),
    ] = None,
    sets: Sets = None,
    pins: Pins = None,
    json_file: JsonFile = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what ranks do when, for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Run one training step in virtual time: seconds, waiting and memory of every rank. No rank is started.

    The step is captured, placed and scheduled as `paceline train` would, and run on the cluster with compute and
    network beside each other. docs/simulator.md tells what is modelled, and the keys of --json.

        paceline simulate recipes/gpt-stdlib.yaml --mesh dp=2
        paceline simulate recipes/gpt-stdlib.yaml --mesh dp=2,pp=2 --schedule zb-h1 --cluster dgx-h100
        paceline simulate --model my_model.py:build --mesh tp=8 --cluster dgx-a100 --trace step.json
    """
    if (recipe is None) == (model is None):
        raise RecipeError("name what to simulate: either a RECIPE or --model FACTORY.")
    from rich.console import Console

    console = Console(stderr=str(json_file) == "-")
    if not console.is_terminal:
        console = Console(width=_WIDTH, stderr=str(json_file) == "-")
    slowness = dict(map(_slow, slow or []))
    loaded, chosen = chosen_plan(
        recipe, Changes(mesh, zero_stage, recompute, schedule, micro_batches, chunks, boundaries, sets, pins)
    )
    _check_slow(slowness, chosen.mesh)
    with console.status("importing") as status:
        from paceline.planner.simulated_report import print_simulation, simulation_to_json

        where = None if cluster is None else _cluster(cluster)
        told = _simulated(loaded, model, chosen, where, slowness, status.update)
    if str(json_file) != "-":
        print_simulation(told, console)
    if json_file is not None:
        write_json(simulation_to_json(told), json_file)
    if trace is not None:
        _write_trace(told, trace)


def _simulated(
    loaded: Recipe | None,
    model: str | None,
    plan: Plan,
    cluster: Cluster | None,
    slowness: dict[int, float],
    tell: Callable[[str], None],
) -> Simulation:
    if loaded is not None:
        from paceline.train.explain import simulate_recipe

        return simulate_recipe(loaded, plan, cluster=cluster, slowness=slowness, tell=tell)
    from paceline.planner.simulated import simulate as simulated
    from paceline.program.build import build, checked_batch
    from paceline.simulator.placed.step import Circumstances

    assert model is not None
    tell("building the module")
    module, batch = build(model, {}, seed=0)
    given = Circumstances(slowness=slowness)
    return simulated(module, checked_batch(batch), plan, cluster=cluster, given=given, tell=tell)


def _cluster(name: str) -> Cluster:
    from paceline.cluster.files import load

    return load(name)


def _slow(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        found = int(rank), float(factor)
    except ValueError:
        raise PlanError(f"cannot read --slow '{text}'; write a rank and a factor, such as 3=1.5.") from None
    if not found[1] > 0:
        raise PlanError(f"--slow {text}: a factor is above 0; 2 computes half as fast.")
    return found


def _check_slow(slowness: dict[int, float], mesh: Mesh) -> None:
    beyond = [rank for rank in slowness if not 0 <= rank < mesh.size]
    if beyond:
        raise PlanError(f"--slow names rank {beyond[0]}, but mesh '{mesh}' has the ranks 0 to {mesh.size - 1}.")


def _write_trace(told: Simulation, file: Path) -> None:
    from paceline.trace import write

    try:
        write(told.events, file)
    except OSError as error:
        raise RecipeError(f"--trace {file} cannot be written: {error}.") from error
