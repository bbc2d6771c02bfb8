"""`paceline bench scaling`: strong and weak scaling measured on this machine, and what the laws make of them.

Settings (`--set key=value`): `ranks` (separated by commas, 1 among them), `passes`, `rounds`, `steps` (of a turn),
`batch`, `axis` (`dp` or `fsdp`), `backend` (`auto`, `shm` or `gloo`), `scale` (`full`, or `tiny` to see that it runs),
`predict` (numbers of ranks), `plot` (a file, .png or .svg).
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench import options as given
from paceline.bench.machine import cores, machine, table_console
from paceline.bench.results import found
from paceline.bench.scaling.jobs import Job, Scaling
from paceline.bench.scaling.picture import save_picture
from paceline.bench.scaling.table import print_tables
from paceline.bench.statistics import Spread, slowest, spread
from paceline.bench.workloads import Model, Scale, workload
from paceline.errors import RecipeError
from paceline.plan import Axis
from paceline.runtime.job.backend import Choice
from paceline.runtime.job.launch import launch
from paceline.simulator.curves import check_picture
from paceline.simulator.laws import (
    Fitted,
    amdahl_limit,
    amdahl_speedup,
    fit_amdahl,
    fit_gustafson,
    fitted,
    gustafson_speedup,
)

_LIMIT_S = 1800.0
_MOST_BY_DEFAULT = 4
_AXES = (Axis.DP.value, Axis.FSDP.value)


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    ranks: tuple[int, ...] = ()
    passes: int = 3
    rounds: int = 5
    steps: int = 2
    batch: int = 8
    axis: str = Axis.DP.value
    backend: Choice = Choice.AUTO
    scale: Scale = Scale.FULL
    predict: tuple[int, ...] = (8, 64, 512)
    plot: Path | None = None

    @classmethod
    def read(cls, options: dict[str, str]) -> Settings:
        """Read `key=value` pairs.

        Raises:
            RecipeError: a key or a value is unknown, or numbers do not fit together.
            LaunchError: a backend is unknown.
        """
        readers: dict[str, given.Reader] = {
            "ranks": partial(given.whole_numbers, least=1),
            "predict": partial(given.whole_numbers, least=1),
            "passes": partial(given.whole_number, least=1),
            "rounds": partial(given.whole_number, least=1),
            "steps": partial(given.whole_number, least=1),
            "batch": partial(given.whole_number, least=1),
            "axis": lambda key, text: given.texts(key, text, _AXES)[0],
            "backend": given.backend,
            "scale": partial(given.name, known=list(Scale)),
            "plot": _picture,
        }
        settings = given.settings_with(cls(ranks=powers_of_two(min(cores(), _MOST_BY_DEFAULT))), options, readers)
        settings = replace(settings, ranks=tuple(sorted(settings.ranks)))
        settings.check()
        return settings

    def check(self) -> None:
        """Hold the numbers to each other.

        Raises:
            RecipeError: they do not fit together.
        """
        if len(self.ranks) < 2 or self.ranks[0] != 1:
            raise RecipeError(
                f"ranks are {', '.join(map(str, self.ranks))}; scaling is relative to 1, and needs another number "
                "beside it, as in ranks=1,2,4."
            )
        uneven = [ranks for ranks in self.ranks if self.batch % ranks]
        if uneven:
            raise RecipeError(
                f"a batch of {self.batch} cannot be divided evenly among {uneven[0]} ranks; give another batch, or "
                "other ranks."
            )


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on; 2 among them always."""
    return tuple(2**power for power in range(max(most, 2).bit_length()))


def main(options: dict[str, str]) -> dict[str, Any]:
    """Measure, print tables, draw, and return the object of `--json`; its keys are told in `docs/benchmarks.md`.

    Raises:
        RecipeError: a setting is unknown or does not fit.
    """
    settings = Settings.read(options)
    result: dict[str, Any] = {
        "title": workload(Model.GPT, settings.scale).title.rpartition(", batch")[0],
        "settings": {
            "ranks": list(settings.ranks),
            "passes": settings.passes,
            "rounds": settings.rounds,
            "steps": settings.steps,
            "batch": settings.batch,
            "axis": settings.axis,
        },
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        times, result["machine"]["backend"] = _measured(settings, Path(folder))
    result |= summary(settings.ranks, times, settings.predict)
    print_tables(table_console(), result)
    if settings.plot is not None:
        save_picture(result, settings.plot)
    return result


def _measured(settings: Settings, folder: Path) -> tuple[dict[Scaling, dict[int, list[float]]], str]:
    """Return the seconds of each round, by what was measured and ranks; and how they exchanged, in words.

    Jobs of all numbers of ranks follow each other, again and again, so that a machine's mood is everybody's.
    """
    times: dict[Scaling, dict[int, list[float]]] = {who: {} for who in Scaling}
    words = ""
    for number in range(settings.passes):
        for ranks in settings.ranks:
            own = folder / f"{number}-{ranks}"
            own.mkdir()
            title = f"pass {number + 1} of {settings.passes}: {ranks} rank{'s' if ranks > 1 else ''}"
            job = Job(
                str(own),
                settings.scale,
                settings.axis,
                settings.batch,
                settings.rounds,
                settings.steps,
                settings.backend.value,
                title,
            )
            launch(
                "paceline.bench.scaling.jobs:take_times",
                job.to_json(),
                ranks,
                environment={"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(folder / "programs")},
                timeout_s=_LIMIT_S,
            )
            left = found(own, ranks)
            words = left[-1]["words"]
            for who in left[0]["step_s"]:
                rounds = slowest([rank["step_s"][who] for rank in left])
                times[Scaling(who)].setdefault(ranks, []).extend(rounds)
    times[Scaling.WEAK][1] = times[Scaling.STRONG][1]
    return times, words


def summary(
    ranks: tuple[int, ...], times: dict[Scaling, dict[int, list[float]]], predict: tuple[int, ...]
) -> dict[str, Any]:
    """Return what was measured, the fractions that fit it, and what they predict."""
    fits = {Scaling.STRONG: fit_amdahl, Scaling.WEAK: fit_gustafson}
    laws = {Scaling.STRONG: amdahl_speedup, Scaling.WEAK: gustafson_speedup}
    values: dict[str, Any] = {"eager_s": spread(times[Scaling.EAGER][1]).to_json()}
    for who, fit in fits.items():
        rounds = np.array([times[who][count] for count in ranks]).T  # [rounds, ranks]
        fraction = fitted(fit, ranks, rounds)
        law = laws[who]
        more = [count for count in predict if count > ranks[-1]]
        values[str(who)] = {
            "step_s": {str(count): spread(times[who][count]).to_json() for count in ranks},
            "speedup": {str(count): _speedup(who, count, times[who]).to_json() for count in ranks},
            "fraction": {"value": fraction.fraction, "low": fraction.low, "high": fraction.high},
            "residual": _residual(who, ranks, times[who], float(fraction.fraction)),
            "predicted": {
                str(count): {
                    "speedup": float(law(fraction.fraction, count)),
                    "low": float(law(fraction.high, count)),
                    "high": float(law(fraction.low, count)),
                }
                for count in more
            },
        }
        if who is Scaling.STRONG:
            values[str(who)]["limit"] = _limits(fraction)
    return values


def _speedup(who: Scaling, count: int, times: dict[int, list[float]]) -> Spread:
    """Return by how much more is done in a time on some ranks than on one, over the rounds."""
    grown = count if who is Scaling.WEAK else 1
    one_s = spread(times[1]).median
    return spread([grown * one_s / seconds for seconds in times[count]])


def _residual(who: Scaling, ranks: tuple[int, ...], times: dict[int, list[float]], fraction: float) -> float | None:
    """Return the largest difference between law and measurement, as a share; None where two points leave none."""
    if len(ranks) < 3:
        return None
    law = amdahl_speedup if who is Scaling.STRONG else gustafson_speedup
    return max(abs(float(law(fraction, count)) / _speedup(who, count, times).median - 1) for count in ranks)


def _limits(fraction: Fitted) -> dict[str, float | None]:
    """Return Amdahl's limit; None where there is none."""
    of = {"value": fraction.fraction, "low": fraction.high, "high": fraction.low}
    limits = {name: amdahl_limit(value) for name, value in of.items()}
    return {name: None if math.isinf(limit) else limit for name, limit in limits.items()}


def _picture(_key: str, text: str) -> Path:
    """Read the path of a picture, and see that one can be drawn there."""
    check_picture(Path(text))
    return Path(text)
