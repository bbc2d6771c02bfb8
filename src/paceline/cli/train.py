"""`paceline train`: a recipe becomes a run directory, on processes started here or by a launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Launch, LaunchOption, Sets, assignments
from paceline.cli.output import latest_run_dir, new_run_dir
from paceline.cli.world import World
from paceline.errors import RecipeError


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="YAML file that names model, data and all settings.")
    ],
    mesh: Annotated[str | None, typer.Option(metavar="MESH", help="Ranks, such as dp=2 or dp=2,fsdp=2.")] = None,
    sets: Sets = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the latest run, from its last checkpoint.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the run; by default the next runs/NAME-N.")
    ] = None,
    launch: LaunchOption = None,
) -> None:
    """Train from a recipe.

    On this machine, a process is started for every rank of the mesh:

        paceline train recipes/gpt-stdlib.yaml --mesh fsdp=2 --set train.steps=100

    Under torchrun, on one machine or several, ranks are the processes it started, and --out is needed:

        torchrun --nproc-per-node 4 -m paceline.cli.main train RECIPE --mesh dp=4 --out DIR

    A run directory holds config.yaml, plan.yaml, metrics.jsonl, TensorBoard events, a log per rank and the checkpoints.
    Ctrl-C ends a run after the step in progress, with a checkpoint that --resume goes on from, on another mesh if you
    wish.
    """
    from paceline.train.recipe import load_recipe

    overrides = assignments(sets, mesh, launch)
    loaded = load_recipe(recipe, overrides)
    world = World.from_environment(os.environ)
    if world is not None:
        world.check(loaded.mesh, loaded.launch)
        if out is None:
            raise RecipeError(
                "under a launcher all ranks must agree on the directory of the run: name it with --out DIR."
            )
        # The others would race with rank 0, whose refusal ends them too.
        run_dir = (
            latest_run_dir(out, loaded.name) if resume else new_run_dir(out, loaded.name) if world.rank == 0 else out
        )
    else:
        run_dir = latest_run_dir(out, loaded.name) if resume else new_run_dir(out, loaded.name)

    if world is None and loaded.mesh.size > 1 and loaded.launch == Launch.PROCESSES.value:
        from paceline.runtime.launch import launch as launch_ranks

        launch_ranks(
            "paceline.cli.train:train_rank",
            [str(recipe), str(run_dir), "resume" if resume else "start", *overrides],
            loaded.mesh.size,
            log_dir=run_dir / "logs",
        )
    else:
        train_rank([str(recipe), str(run_dir), "resume" if resume else "start", *overrides])


def train_rank(arguments: list[str]) -> None:
    """Train as the rank that the environment names; what every process of a run executes.

    Args:
        arguments: the recipe's path, the run directory, `start` or `resume`, and the overrides of the recipe.
    """
    from paceline.train.recipe import load_recipe
    from paceline.train.run import train as train_recipe

    recipe, run_dir, mode, *overrides = arguments
    train_recipe(load_recipe(recipe, overrides), Path(run_dir), mode == "resume")
