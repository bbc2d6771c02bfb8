"""A worker's process, on any host that sees the run: `python -m paceline.train.servers.worker.process RUN_DIR`."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import RankFailed
from paceline.runtime.job.launch import launch
from paceline.runtime.job.rendezvous import join
from paceline.train.recipe import Recipe, load_recipe
from paceline.train.rundir import RunDirectory
from paceline.train.servers.processes.children import START_AGAIN, end_with
from paceline.train.servers.recipe.groups import trained
from paceline.train.servers.rundir import exchange_of
from paceline.train.servers.worker.crew import Leader, follow
from paceline.train.servers.worker.labour import Leaving, labour
from paceline.train.servers.worker.parts import build_parts


def main() -> None:
    """Be a worker; what is wrong is in the log, and in the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--group", type=int)
    given = parser.parse_args()
    end_with(lambda: _work(RunDirectory(given.run), given.index, given.group))


def _work(run: RunDirectory, index: int, group: int | None) -> None:
    recipe = load_recipe(run.config)
    if recipe.launch == "processes" and recipe.mesh.size > 1:
        _lead_ranks(run, recipe, index, group)
        return
    _listen_to_signals()
    leaving = Leaving()
    parts = build_parts(recipe, trained(exchange_of(run, group).read().job), _device_of(recipe, index), group or 0)
    labour(run, recipe, group, parts, leaving)


def _lead_ranks(run: RunDirectory, recipe: Recipe, index: int, group: int | None) -> None:
    """Start the ranks of a worker, and see them to their end."""
    arguments: dict[str, Any] = {"run": str(run.root), "group": group}
    logs = run.root / "logs" / f"worker-start-{index}-ranks"
    try:
        launch("paceline.train.servers.worker.process:rank", arguments, recipe.mesh.size, log_dir=logs)
    except SystemExit:  # it was asked to leave, and has
        return
    except RankFailed as error:
        if "was ended by" not in str(error):
            raise
        print(f"error: {error}", file=sys.stderr)  # killed: nothing is wrong with the program
        raise SystemExit(START_AGAIN) from error


def rank(arguments: dict[str, Any]) -> None:
    """Be a rank of a worker; the first one talks to servers."""
    run, group = RunDirectory(Path(arguments["run"])), arguments["group"]
    recipe = load_recipe(run.config)
    _listen_to_signals()
    with join(recipe.device, recipe.backend) as world:
        parts = build_parts(recipe, trained(exchange_of(run, group).read().job), world.device, group or 0)
        if world.rank:
            follow(parts.computer, parts.portions, parts.validation, parts.state_of_buffers)
            return
        leader = Leader(parts.computer)
        labour(run, recipe, group, replace(parts, computer=leader), Leaving())
        leader.end()


def _device_of(recipe: Recipe, index: int) -> torch.device:
    """Return where the worker of this number on its host computes."""
    if recipe.device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", index % torch.cuda.device_count())
    return torch.device("cpu")


def _listen_to_signals() -> None:
    faulthandler.enable()
    with suppress(AttributeError):  # Windows
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    main()
