"""`paceline bench collectives`: the backend `shm` against Gloo and the memory's own copy speed, in one interleaved run.

Settings (`--set key=value`): `sizes` (in bytes, such as `64,4k,16M`), `ranks`, `kinds` (all separated by commas),
`rounds`, `cluster` (whose expected times stand beside). With `--data FILE`, published bandwidths are judged instead;
under torchrun and other launchers, the job's own ranks are measured (`job_exchanges`).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from paceline.bench import options as given
from paceline.bench.collectives import published
from paceline.bench.collectives.exchanges import DTYPE, Exchange, Kind
from paceline.bench.collectives.expected import AUTO, expected_cluster, expected_seconds
from paceline.bench.collectives.jobs import Job, Times, Way, repetitions
from paceline.bench.collectives.table import print_tables
from paceline.bench.collectives.within_job import Asked, measure
from paceline.bench.groups import SHM
from paceline.bench.machine import machine, table_console
from paceline.bench.results import found
from paceline.bench.statistics import ratios, slowest, spread
from paceline.cluster.cluster import Cluster
from paceline.errors import RecipeError
from paceline.runtime.job.launch import launch
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import World
from paceline.shm import unavailable

_LIMIT_S = 3600.0
_RATIOS = {
    "gloo_over_shm": (Way.GLOO, Way.SHM),
    "gloo_over_in_place": (Way.GLOO, Way.SHM_IN_PLACE),
    "in_place_over_bound": (Way.SHM_IN_PLACE, Way.BOUND),
}


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    sizes: tuple[int, ...] = tuple(4**power for power in range(3, 14))
    ranks: tuple[int, ...] = (2, 4)
    kinds: tuple[Kind, ...] = tuple(Kind)
    rounds: int = 10
    cluster: str = AUTO

    @classmethod
    def read(cls, options: dict[str, str]) -> Settings:
        """Read `key=value` pairs.

        Raises:
            RecipeError: a key or a value is unknown, or a size cannot be divided among the ranks.
        """
        readers: dict[str, given.Reader] = {
            "sizes": given.byte_counts,
            "ranks": partial(given.whole_numbers, least=2),
            "kinds": partial(given.names, known=list(Kind)),
            "rounds": partial(given.whole_number, least=1),
            "cluster": given.text,
        }
        settings = given.settings_with(cls(), options, readers)
        for ranks in settings.ranks:
            for size in settings.sizes:
                if size % (ranks * DTYPE.itemsize):
                    raise RecipeError(
                        f"{size} bytes cannot be divided among {ranks} ranks in whole numbers of {DTYPE.itemsize} "
                        f"bytes; sizes are multiples of {ranks * DTYPE.itemsize}."
                    )
        return settings


def main(options: dict[str, str]) -> dict[str, Any]:
    """Measure, print tables, and return the object of `--json`; its keys are told in `docs/benchmarks.md`.

    Raises:
        RecipeError: a setting is unknown, or this machine has no backend `shm`.
        ClusterError: there is no such cluster.
    """
    if "data" in options:
        return published.main(Path(options["data"]))
    settings = Settings.read(options)
    cluster = expected_cluster(settings.cluster)
    job = World.from_environment(os.environ)
    if job is not None and job.size > 1:
        with join("auto") as world:
            return measure(world, Asked(settings.kinds, settings.sizes, settings.rounds), cluster)
    reason = unavailable()
    if reason is not None:
        raise RecipeError(f"there is nothing to compare: no backend '{SHM}' on this machine: {reason}")
    result: dict[str, Any] = {
        "collectives": {},
        "settings": {
            "rounds": settings.rounds,
            "repetitions": {str(size): repetitions(size) for size in settings.sizes},
            "cluster": None if cluster is None else cluster.name,
        },
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for ranks in settings.ranks:
            result["collectives"][str(ranks)], result["machine"]["shm"] = _run(ranks, settings, Path(folder), cluster)
    print_tables(table_console(), result)
    return result


def _run(
    ranks: int, settings: Settings, folder: Path, cluster: Cluster | None
) -> tuple[dict[str, dict[str, dict[str, Any]]], str]:
    """Return what some ranks found, by kind and bytes; and how the backend `shm` works on this machine, in words."""
    own = folder / str(ranks)
    own.mkdir()
    job = Job(str(own), settings.kinds, settings.sizes, settings.rounds, f"{ranks} ranks")
    launch(
        "paceline.bench.collectives.jobs:take_times",
        job.to_json(),
        ranks,
        environment={"OMP_NUM_THREADS": "1"},
        timeout_s=_LIMIT_S,
    )
    left = found(own, ranks)
    taken = [rank["times"] for rank in left]
    figures: dict[str, dict[str, dict[str, Any]]] = {str(kind): {} for kind in settings.kinds}
    for kind, size in product(settings.kinds, settings.sizes):
        expected = None if cluster is None else expected_seconds(cluster, Exchange(kind, size, ranks))
        figures[str(kind)][str(size)] = _summary(size, [times[kind][str(size)] for times in taken], expected)
    return figures, left[0]["shm"]


def _summary(size: int, taken: list[Times], expected_s: float | None = None) -> dict[str, Any]:
    """Return what the repetitions of all ranks say about one collective of one size; without keys of ways not taken."""
    ways = [way for way in Way if way in taken[0]]
    rounds = {way: [slowest(ranks) for ranks in zip(*(times[way] for times in taken), strict=True)] for way in ways}
    overall = {way: spread([*chain.from_iterable(rounds[way])]) for way in ways}
    by_round = {way: [spread(times).median for times in rounds[way]] for way in ways}
    compared = {
        name: ratios(by_round[over], by_round[under])
        for name, (over, under) in _RATIOS.items()
        if over in ways and under in ways
    }
    return {
        **{f"{way}_us": overall[way].median * 1e6 for way in ways},
        **{name: ratio.median for name, ratio in compared.items()},
        "gb_s": {way: size / overall[way].median * 1e-9 for way in ways},
        **({} if expected_s is None else {"expected": {"us": expected_s * 1e6, "gb_s": size / expected_s * 1e-9}}),
        "spread": {
            **{
                f"{way}_us": {
                    "min": min(chain.from_iterable(rounds[way])) * 1e6,
                    "low": overall[way].low * 1e6,
                    "high": overall[way].high * 1e6,
                }
                for way in ways
            },
            **{name: {"low": ratio.low, "high": ratio.high} for name, ratio in compared.items()},
        },
    }
