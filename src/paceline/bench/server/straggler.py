"""Throughput with one worker at a third of the speed of the others, by consistency, beside workers that are all alike.

Settings: `straggler_rounds`, `straggler_steps`, `straggler_workers`, `straggler_nap_ms` (milliseconds of a sample; a
step has 16 for each worker). `of_even` is the throughput with a straggler over that with none; n workers of which one
has a third of the speed could at best reach (n - 2 / 3) / n. Work is dealt task by task, so finer tasks even it out
under `bsp` too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paceline.bench import options as given
from paceline.bench.server.runs import samples_per_s
from paceline.bench.statistics import ratios, spread

_SAMPLES: Final = 16
_SLOW: Final = 3.0

MODES: Final[Mapping[str, tuple[str, int]]] = {
    "bsp": ("bsp", 1),
    "bsp, 4 tasks for each worker": ("bsp", 4),
    "ssp(4)": ("ssp(4)", 1),
    "asp": ("asp", 1),
}
"""Consistency, and tasks of a step for each worker."""


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    straggler_rounds: int = 3
    straggler_steps: int = 60
    straggler_workers: int = 3
    straggler_nap_ms: int = 5


READERS: Final[dict[str, given.Reader]] = {
    "straggler_rounds": partial(given.whole_number, least=1),
    "straggler_steps": partial(given.whole_number, least=3),
    "straggler_workers": partial(given.whole_number, least=2),
    "straggler_nap_ms": partial(given.whole_number, least=1),
}
KEYS: Final = tuple(READERS)


def run(options: dict[str, str]) -> dict[str, Any]:
    """Measure; return `straggler`, with samples a second by mode, and `settings`.

    Raises:
        RecipeError: a setting is unknown, or a run failed.
    """
    settings = given.settings_with(Settings(), options, READERS)
    everybody = [(mode, slow) for mode in MODES for slow in (1.0, _SLOW)]
    speeds: dict[tuple[str, float], list[float]] = {who: [] for who in everybody}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("one worker is slow", total=settings.straggler_rounds * len(everybody))
        for turn in range(settings.straggler_rounds):
            first = turn % len(everybody)
            for mode, slow in everybody[first:] + everybody[:first]:
                speeds[mode, slow].append(_turn(mode, slow, settings))
                progress.advance(task)
    modes = {
        mode: {
            "even_samples_s": spread(speeds[mode, 1.0]).to_json(),
            "straggler_samples_s": spread(speeds[mode, _SLOW]).to_json(),
            "of_even": ratios(speeds[mode, _SLOW], speeds[mode, 1.0]).to_json(),
        }
        for mode in MODES
    }
    workers = settings.straggler_workers
    return {
        "straggler": {"modes": modes, "best": (workers - 1 + 1 / _SLOW) / workers},
        "settings": {key.removeprefix("straggler_"): getattr(settings, key) for key in KEYS},
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print what `run` returns."""
    found = result["straggler"]
    table = Table(title="one worker at a third of the speed", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("consistency", "samples/s, all alike", "with a straggler", "of that"):
        table.add_column(name, justify="left" if name == "consistency" else "right", no_wrap=True)
    for mode, speeds in found["modes"].items():
        share = speeds["of_even"]
        table.add_row(
            mode,
            f"{speeds['even_samples_s']['median']:,.0f}",
            f"{speeds['straggler_samples_s']['median']:,.0f}",
            f"{share['median']:.2f} ({share['low']:.2f} to {share['high']:.2f})",
        )
    console.print(table)
    console.print(f"at best {found['best']:.2f}: what these workers can do together", highlight=False)


def _turn(mode: str, slow: float, settings: Settings) -> float:
    """Return the samples a second of one run."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(_recipe(mode, slow, settings, folder)), encoding="utf-8")
        return samples_per_s(Path(folder) / "run", recipe, [], settings.straggler_steps)


def _recipe(mode: str, slow: float, settings: Settings, folder: str) -> dict[str, Any]:
    consistency, tasks = MODES[mode]
    workers, batch = settings.straggler_workers, _SAMPLES * settings.straggler_workers
    place = "paceline.bench.server.straggler_model"
    naps = {
        "length": batch * settings.straggler_steps,
        "nap_s": settings.straggler_nap_ms / 1000,
        "slow": slow,
        "folder": folder,
    }
    return {
        "name": "straggler",
        "model": {"factory": f"{place}:build"},
        "data": {"source": "factory", "dataset": f"{place}:Naps", "args": naps, "validation": 0},
        "train": {"steps": settings.straggler_steps, "batch": batch},
        "optimizer": {"name": "SGD", "lr": 0.001},
        "server": {"workers": workers, "pieces": tasks * workers, "consistency": consistency, "log": False},
    }
