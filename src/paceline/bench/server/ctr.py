"""Samples a second of `recipes/ctr.yaml`: tables on servers, against PyTorch with tables that are kept whole.

Peers are in one process, with dense gradients of tables and with sparse ones, and under DDP with dense ones, which sums
gradients of whole tables. All train the same model by Adagrad on the same samples, and take turns; each turn is a job
of its own, and its first third does not count. Settings: `ctr_rounds`, `ctr_steps` (of a turn), `ctr_batch`,
`ctr_workers`, `ctr_rows` (of tables that are kept whole; the log has about as many keys). Beside it: lines a second
that sources of text files read and parse, a batch of random lines at a time, by processor time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paceline.bench import options as given
from paceline.bench.results import found
from paceline.bench.server.runs import COUNTED_FROM, LIMIT_S, samples_per_s
from paceline.bench.statistics import ratios, spread
from paceline.errors import RecipeError
from paceline.runtime.job.launch import launch
from paceline.train.data import open_source
from paceline.train.data.config import CriteoData, LibsvmData

RECIPE: Final = Path(__file__).parents[4] / "recipes/ctr.yaml"


class Contestant(StrEnum):
    """Who trains."""

    SERVERS = "servers"
    DDP = "ddp-dense"
    ONE_DENSE = "one-process-dense"
    ONE_SPARSE = "one-process-sparse"


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    ctr_rounds: int = 3
    ctr_steps: int = 90
    ctr_batch: int = 4096
    ctr_workers: int = 2
    ctr_rows: tuple[int, ...] = (100_000, 1_000_000)


READERS: Final[dict[str, given.Reader]] = {
    "ctr_rounds": partial(given.whole_number, least=1),
    "ctr_steps": partial(given.whole_number, least=3),
    "ctr_batch": partial(given.whole_number, least=2),
    "ctr_workers": partial(given.whole_number, least=1),
    "ctr_rows": partial(given.whole_numbers, least=100),
}
KEYS: Final = tuple(READERS)


def run(options: dict[str, str]) -> dict[str, Any]:
    """Measure; return `ctr`, with samples a second and how ours compare by rows of the tables, and `settings`.

    Raises:
        RecipeError: a setting is unknown, or the recipe is not there: it comes with the repository, not the package.
        RankFailed: a peer failed.
    """
    settings = given.settings_with(Settings(), options, READERS)
    if not RECIPE.exists():
        raise RecipeError(f"there is no {RECIPE}; run this part of the benchmark from the repository.")
    everybody = [(rows, who) for rows in settings.ctr_rows for who in Contestant]
    rounds: dict[str, dict[str, list[float]]] = {str(rows): {} for rows in settings.ctr_rows}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("samples a second of recipes/ctr.yaml", total=settings.ctr_rounds * len(everybody))
        for turn in range(settings.ctr_rounds):
            first = turn % len(everybody)
            for rows, who in everybody[first:] + everybody[:first]:
                rounds[str(rows)].setdefault(who.value, []).append(_turn(who, rows, settings))
                progress.advance(task)
    speeds = {rows: _summary(found) for rows, found in rounds.items()}
    measured = {"samples_s": speeds, "rounds": rounds, "lines_s": _lines_s()}
    return {"ctr": measured, "settings": {key.removeprefix("ctr_"): getattr(settings, key) for key in KEYS}}


def _summary(rounds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    ours = rounds[Contestant.SERVERS]
    return {
        who: {**spread(speeds).to_json(), "ours_to_it": ratios(ours, speeds).to_json()}
        for who, speeds in rounds.items()
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print what `run` returns."""
    table = Table(title="samples a second of recipes/ctr.yaml", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("rows of the tables", "who", "samples/s", "ours / it"):
        table.add_column(name, justify="left" if name == "who" else "right", no_wrap=True)
    for rows, by_name in result["ctr"]["samples_s"].items():
        for who, speed in by_name.items():
            ratio = speed["ours_to_it"]
            table.add_row(
                f"{int(rows):,}",
                who,
                f"{speed['median']:,.0f} ({speed['low']:,.0f} to {speed['high']:,.0f})",
                f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
            )
    console.print(table)
    speeds = ", ".join(f"{source} {speed:,.0f}" for source, speed in result["ctr"]["lines_s"].items())
    console.print(f"lines read and parsed a second of processor time: {speeds}", highlight=False)


def _turn(who: Contestant, rows: int, settings: Settings) -> float:
    """Return the samples a second of one job."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        if who is Contestant.SERVERS:
            sets = [*_overrides(rows, settings), f"server.workers={settings.ctr_workers}"]
            return samples_per_s(folder / "run", RECIPE, sets, settings.ctr_steps)
        arguments = {
            "folder": name,
            "recipe": str(RECIPE),
            "overrides": [*_overrides(rows, settings), f"model.args.rows={rows}", f"data.args.buckets={rows}"],
            "sparse": who is Contestant.ONE_SPARSE,
            "steps": settings.ctr_steps,
            "counted_from": COUNTED_FROM,
        }
        ranks = settings.ctr_workers if who is Contestant.DDP else 1
        launch(
            "paceline.bench.server.ctr_jobs:train_whole_tables",
            arguments,
            ranks,
            environment={"OMP_NUM_THREADS": "1"},
            timeout_s=LIMIT_S,
        )
        counted = settings.ctr_steps - int(settings.ctr_steps * COUNTED_FROM)
        seconds = [float(rank["seconds"]) for rank in found(folder, ranks)]
        return counted * settings.ctr_batch / max(seconds)


def _overrides(rows: int, settings: Settings) -> list[str]:
    """What differs from the recipe, for everybody."""
    return [
        f"train={{steps: {settings.ctr_steps}, batch: {settings.ctr_batch}, predict: false}}",
        f"data.args.length={settings.ctr_steps * settings.ctr_batch}",
        f"data.args.values={rows}",
        "data.args.held_out=1",
        "checkpoint.every=null",
    ]


def _lines_s(lines: int = 20_000, batch: int = 4096, rounds: int = 5) -> dict[str, float]:
    """Return lines a second of processor time of each source of text files."""
    random = np.random.default_rng(0)
    found = {}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        file = Path(folder) / "lines"
        for name, config, line in (
            ("libsvm", LibsvmData(source="libsvm", files=(str(file),), validation=0), _libsvm_line),
            ("criteo", CriteoData(source="criteo", files=(str(file),), validation=0), _criteo_line),
        ):
            file.write_text("".join(line(random) for _ in range(lines)))
            source, _ = open_source(config)
            source.batch(np.arange(batch))
            began = time.process_time()
            for _ in range(rounds):
                source.batch(random.integers(lines, size=batch))
            found[name] = rounds * batch / (time.process_time() - began)
    return found


def _libsvm_line(random: np.random.Generator) -> str:
    """As those of UCI Adult: 14 features of 122."""
    indices = np.sort(random.choice(122, 14, replace=False)) + 1
    return f"{random.integers(2)} {' '.join(f'{index}:1' for index in indices)}\n"


def _criteo_line(random: np.random.Generator) -> str:
    numbers = [str(number) if number >= 0 else "" for number in random.integers(-500, 2000, 13)]
    words = [f"{word:08x}" if word % 16 else "" for word in random.integers(2**32, size=26)]
    return "\t".join([str(random.integers(2)), *numbers, *words]) + "\n"
