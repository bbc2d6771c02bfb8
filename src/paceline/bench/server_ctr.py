"""Samples a second of `recipes/ctr.yaml`: tables on servers, against PyTorch with tables that are kept whole.

Peers are in one process, with dense gradients of tables and with sparse ones, and under DDP with dense ones, which sums
gradients of whole tables. All train the same model by Adagrad on the same samples, and take turns; each turn is a job
of its own, and its first third does not count.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paceline.bench.results import found
from paceline.bench.statistics import ratios, spread
from paceline.errors import RecipeError
from paceline.runtime.job.launch import launch
from paceline.train.metrics import read_metrics

_LIMIT_S: Final = 600.0
_COUNTED_FROM: Final = 1 / 3
"""The part of a turn that goes to captures, caches and connections."""


class Contestant(StrEnum):
    """Who trains."""

    SERVERS = "servers"
    DDP = "ddp-dense"
    ONE_DENSE = "one-process-dense"
    ONE_SPARSE = "one-process-sparse"


@dataclass(frozen=True)
class CtrSettings:
    """How much is measured.

    Attributes:
        rounds: how often everybody has a turn.
        steps: of a turn.
        batch: samples of a step, over all workers.
        workers: of ours, and ranks of DDP.
        rows: of the tables that peers keep whole; the made-up log has about as many different keys.
        recipe: the file.
    """

    rounds: int = 3
    steps: int = 90
    batch: int = 4096
    workers: int = 2
    rows: tuple[int, ...] = (100_000, 1_000_000)
    recipe: Path = Path(__file__).parents[3] / "recipes/ctr.yaml"


def measure_ctr(settings: CtrSettings) -> dict[str, Any]:
    """Return samples a second of each contestant, by rows of the tables, with quartiles, and how ours compare.

    Raises:
        RecipeError: the recipe is not there; it comes with the repository, not with the package.
        RankFailed: a peer failed.
    """
    if not settings.recipe.exists():
        raise RecipeError(f"there is no {settings.recipe}; run this benchmark from the repository.")
    rounds: dict[str, dict[str, list[float]]] = {
        str(rows): {who.value: [] for who in Contestant} for rows in settings.rows
    }
    everybody = [(rows, who) for rows in settings.rows for who in Contestant]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("samples a second of recipes/ctr.yaml", total=settings.rounds * len(everybody))
        for turn in range(settings.rounds):
            first = turn % len(everybody)
            for rows, who in everybody[first:] + everybody[:first]:
                rounds[str(rows)][who].append(_turn(who, rows, settings))
                progress.advance(task)
    return {"samples_s": {rows: _summary(times) for rows, times in rounds.items()}, "rounds": rounds}


def _summary(rounds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    ours = rounds[Contestant.SERVERS]
    return {
        who: {**spread(speeds).to_json(), "ours_to_it": ratios(ours, speeds).to_json()}
        for who, speeds in rounds.items()
    }


def print_ctr(console: Console, result: Mapping[str, Any]) -> None:
    """Print what `measure_ctr` returns."""
    table = Table(title="samples a second of recipes/ctr.yaml", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("rows of the tables", "who", "samples/s", "ours / it"):
        table.add_column(name, justify="left" if name == "who" else "right", no_wrap=True)
    for rows, by_name in result["samples_s"].items():
        for who, speed in by_name.items():
            ratio = speed["ours_to_it"]
            table.add_row(
                f"{int(rows):,}",
                who,
                f"{speed['median']:,.0f} ({speed['low']:,.0f} to {speed['high']:,.0f})",
                f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
            )
    console.print(table)


def _turn(who: Contestant, rows: int, settings: CtrSettings) -> float:
    """Return the samples a second of one job."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        if who is Contestant.SERVERS:
            return _servers(folder, rows, settings)
        arguments = {
            "folder": name,
            "recipe": str(settings.recipe),
            "overrides": [*_overrides(rows, settings), f"model.args.rows={rows}", f"data.args.buckets={rows}"],
            "sparse": who is Contestant.ONE_SPARSE,
            "steps": settings.steps,
            "counted_from": _COUNTED_FROM,
        }
        ranks = settings.workers if who is Contestant.DDP else 1
        launch(
            "paceline.bench.server_ctr_jobs:train_whole_tables",
            arguments,
            ranks,
            environment={"OMP_NUM_THREADS": "1"},
            timeout_s=_LIMIT_S,
        )
        counted = settings.steps - int(settings.steps * _COUNTED_FROM)
        seconds = [float(rank["seconds"]) for rank in found(folder, ranks)]
        return counted * settings.batch / max(seconds)


def _overrides(rows: int, settings: CtrSettings) -> list[str]:
    """What differs from the recipe, for everybody."""
    return [
        f"train={{steps: {settings.steps}, batch: {settings.batch}, predict: false}}",
        f"data.args.values={rows}",
        "data.args.held_out=1",
        "checkpoint.every=null",
    ]


def _servers(folder: Path, rows: int, settings: CtrSettings) -> float:
    """Ours: the command that a user gives."""
    sets = [*_overrides(rows, settings), f"server.workers={settings.workers}"]
    command = [sys.executable, "-m", "paceline.cli.main", "train", str(settings.recipe), "--out", str(folder / "run")]
    run = subprocess.run(
        [*command, *(word for text in sets for word in ("--set", text))],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if run.returncode:
        raise RecipeError(f"paceline train {settings.recipe} ended with {run.returncode}:\n{run.stderr[-2000:]}")
    steps = read_metrics(folder / "run/metrics.jsonl")[int(settings.steps * _COUNTED_FROM) :]
    samples, seconds = (sum(float(step[key]) for step in steps) for key in ("tokens", "step_s"))
    return samples / seconds
