"""The profile of the A100: which published runs it is fitted to, by rule, and what other choices would have given.

Fitted are vTrain's runs: 30 of several hosts and 100 of one, spread out over the layouts by `choosing.spread_out`.
Table 1 of Megatron-LM is never fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from paceline.bench.predictions.fitted import profiles
from paceline.bench.predictions.judging import Judged, judged, regrets
from paceline.bench.predictions.predicted import described, grouped, predictions
from paceline.bench.predictions.samples import Sample
from paceline.cluster.cluster import Cluster
from paceline.cluster.files import load
from paceline.simulator.closed_form.choosing import spread_out
from paceline.simulator.closed_form.kriging import LAYOUTS, coordinates

SEVERAL_HOSTS, ONE_HOST, TABLE = "ground_truth_multi", "ground_truth_single", "cases_april2021"
"""By which sources are known: vTrain's runs on several hosts and on one, and Table 1 of Megatron-LM."""

FITTED = {SEVERAL_HOSTS: 30, ONE_HOST: 100}
"""How many runs of each source are fitted."""


def of_source(samples: Sequence[Sample], name: str) -> list[Sample]:
    """Return samples of step times from a source."""
    return [sample for sample in samples if name in sample.row.text("source") and not sample.is_memory]


def chosen(samples: Sequence[Sample], *, seed: int | None = None, hidden: int | None = None) -> list[Sample]:
    """Return the runs to fit to.

    Args:
        samples: all there are.
        seed: draws the first run of each source; None: the one nearest to the mean.
        hidden: the only hidden size that is taken from runs on one host.
    """
    draw = np.random.default_rng(seed)
    found: list[Sample] = []
    for source, count in FITTED.items():
        pool = of_source(samples, source)
        if hidden is not None and source == ONE_HOST:
            pool = [sample for sample in pool if sample.configuration.model.hidden == hidden]
        start = None if seed is None else int(draw.integers(len(pool)))
        found += [pool[place] for place in spread_out(_points(pool), count, start)]
    return found


def _points(samples: Sequence[Sample]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    points: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}
    for places in grouped(samples):
        configurations = [samples[place].configuration for place in places]
        found = coordinates(*described(configurations), load(configurations[0].cluster))
        points |= dict(zip(places, found / LAYOUTS.reach, strict=True))
    return np.stack([points[place] for place in range(len(samples))])


@dataclass(frozen=True)
class Draw:
    """Errors of one choice of fitted runs, as shares, on runs that were not chosen.

    Attributes:
        values: by what they are of.
    """

    values: Mapping[str, float]


def draws(samples: Sequence[Sample], clusters: Mapping[str, Cluster], seeds: Iterable[int]) -> list[Draw]:
    """Return errors for several choices, each with a hold-out of each hidden size on one host."""
    return [Draw(_whole(samples, clusters, seed) | _held_out(samples, clusters, seed)) for seed in seeds]


def summary(found: Sequence[Draw]) -> dict[str, tuple[float, float]]:
    """Return for each figure the median and the worst over draws."""
    return {
        name: (median(draw.values[name] for draw in found), max(draw.values[name] for draw in found))
        for name in found[0].values
    }


def _judged(samples: Sequence[Sample], clusters: Mapping[str, Cluster], fitted: Sequence[Sample]) -> list[Judged]:
    lines = frozenset(line for sample in fitted for line in sample.lines)
    used = profiles(samples, clusters, lines).clusters
    return judged(samples, predictions(samples, used), used, lines)


def _errors(found: Iterable[Judged], source: str, hidden: int | None = None) -> list[float]:
    return [
        abs(row.error)
        for row in found
        if row.counts
        and source in row.sample.row.text("source")
        and hidden in (None, row.sample.configuration.model.hidden)
    ]


def _whole(samples: Sequence[Sample], clusters: Mapping[str, Cluster], seed: int) -> dict[str, float]:
    found = _judged(samples, clusters, chosen(samples, seed=seed))
    table, several, one = (_errors(found, source) for source in (TABLE, SEVERAL_HOSTS, ONE_HOST))
    lists = regrets(row for row in found if row.counts and SEVERAL_HOSTS in row.sample.row.text("source"))
    return {
        "Megatron-LM Table 1, MAPE": float(np.mean(table)),
        "Megatron-LM Table 1, worst": max(table),
        "vTrain, several hosts, MAPE": float(np.mean(several)),
        "vTrain, several hosts, median": float(np.median(several)),
        "vTrain, one host, MAPE": float(np.mean(one)),
        "regret, mean of vTrain's groups": float(np.mean([each.regret for each in lists])),
        "regret, worst of vTrain's groups": max(each.regret for each in lists),
    }


def _held_out(samples: Sequence[Sample], clusters: Mapping[str, Cluster], seed: int) -> dict[str, float]:
    sizes = sorted({sample.configuration.model.hidden for sample in of_source(samples, ONE_HOST)})
    values = {}
    for hidden in sizes:
        for other in (size for size in sizes if size != hidden):
            fitted = chosen(samples, seed=seed, hidden=other)
            errors = _errors(_judged(samples, clusters, fitted), ONE_HOST, hidden)
            values[f"vTrain, one host, hidden size {hidden} never fitted, MAPE"] = float(np.mean(errors))
    return values
