"""`paceline train`: a recipe becomes a run directory, on processes started here or by a launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import BackendOption, Launch, LaunchOption, Pins, Sets, assignments
from paceline.cli.output import latest_run_dir, new_run_dir
from paceline.errors import LaunchError, RecipeError


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="YAML file that names model, data and all settings.")
    ],
    mesh: Annotated[str | None, typer.Option(metavar="MESH", help="Ranks, such as dp=2 or dp=2,fsdp=2.")] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Execute this plan, which paceline plan -o or a run wrote.")
    ] = None,
    sets: Sets = None,
    pins: Pins = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the latest run, from its last checkpoint.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the run; by default the next runs/NAME-N.")
    ] = None,
    launch: LaunchOption = None,
    backend: BackendOption = None,
) -> None:
    """Train from a recipe.

    On this machine, a process is started for every rank of the mesh:

        paceline train recipes/gpt-stdlib.yaml --mesh fsdp=2 --set train.steps=100

    Under torchrun, on one machine or several, ranks are the processes it started, and --out is needed:

        torchrun --nproc-per-node 4 -m paceline.cli.main train RECIPE --mesh dp=4 --out DIR

    With a section `server`, parameters are on servers, and workers compute gradients; all processes are started here:

        paceline train recipes/ctr.yaml --set server.workers=4 --set "server.consistency=ssp(3)"

    By a plan, from a search or from another run's plan.yaml; --mesh and --set win over it:

        paceline train recipes/gpt-stdlib.yaml --plan plan.yaml

    A run directory holds config.yaml, plan.yaml, metrics.jsonl, TensorBoard events, a log per rank and the checkpoints.
    Ctrl-C ends a run after the step in progress, with a checkpoint that --resume goes on from, on another mesh if you
    wish.
    """
    from paceline.runtime.job.world import World, check_world
    from paceline.train.recipe import load_recipe

    overrides = assignments(sets, mesh, launch, backend, pins)
    if plan is not None:
        from paceline.train.planned import assignments_of, check_batch

        overrides = [*assignments_of(plan), *overrides]
    loaded = load_recipe(recipe, overrides)
    if plan is not None:
        check_batch(loaded, plan)
    inprocess = loaded.launch == Launch.INPROCESS.value
    world = World.from_environment(os.environ)
    if loaded.server is not None:
        if world is not None:
            raise LaunchError(
                f"{world.launcher.value} started {world.size} ranks, but a recipe with a section `server` starts its "
                "processes itself: run paceline train without a launcher, and paceline join RUN_DIR worker elsewhere."
            )
        from paceline.train.servers.processes.nursery import Nursery
        from paceline.train.servers.supervisor.supervise import supervise

        run_dir = latest_run_dir(out, loaded.name) if resume else new_run_dir(out, loaded.name)
        supervise(loaded, run_dir, resume, Nursery.fork())
        return
    if world is None:
        run_dir = latest_run_dir(out, loaded.name) if resume else new_run_dir(out, loaded.name)
    else:
        if inprocess:
            raise LaunchError(
                f"{world.launcher.value} started {world.size} ranks, but --launch inprocess runs all ranks in one "
                "process; start it without a launcher, or leave out inprocess."
            )
        check_world(loaded.mesh, world)
        run_dir = _agreed_run_dir(out, loaded.name, resume, world.rank)

    arguments = {"recipe": str(recipe), "overrides": overrides, "run_dir": str(run_dir), "resume": resume}
    if world is None and loaded.mesh.size > 1 and not inprocess:
        from paceline.runtime.job.launch import launch as launch_ranks

        launch_ranks(
            "paceline.cli.train:train_rank",
            arguments,
            loaded.mesh.size,
            loaded=["paceline.train.run"],
            log_dir=run_dir / "logs",
        )
    else:
        train_rank(arguments)


def train_rank(arguments: dict[str, Any]) -> None:
    """Train as the rank that the environment names; what every process of a run executes.

    Args:
        arguments: `recipe`, its path; `overrides` of it; `run_dir`, and whether to `resume` in it.
    """
    from paceline.train.recipe import load_recipe
    from paceline.train.run import train as train_recipe

    recipe = load_recipe(arguments["recipe"], arguments["overrides"])
    train_recipe(recipe, Path(arguments["run_dir"]), arguments["resume"])


def _agreed_run_dir(out: Path | None, name: str, resume: bool, rank: int) -> Path:
    """Return the directory of a run whose ranks cannot talk yet, the same on all of them.

    Raises:
        RecipeError: `out` is missing, or does not fit what is to be done there.
    """
    if out is None:
        raise RecipeError("under a launcher all ranks must agree on the directory of the run; name it with --out DIR.")
    if resume:
        return latest_run_dir(out, name)
    # Only rank 0 looks whether it is free: it also begins to fill it, which would look like an earlier run to others.
    return new_run_dir(out, name) if rank == 0 else out
