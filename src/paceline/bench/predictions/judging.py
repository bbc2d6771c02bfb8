"""How far predictions are from what was measured: errors by source, and what picking by prediction would have cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.predictions.measured import measured
from paceline.bench.predictions.predicted import Prediction
from paceline.bench.predictions.samples import Sample
from paceline.cluster.cluster import Cluster

_LAYOUTS = 3
"""Layouts that a group needs so that picking one of them says something."""


@dataclass(frozen=True)
class Judged:
    """A prediction beside what was measured.

    Attributes:
        sample: what was told.
        predicted, measured: seconds, bytes, or a share.
        cautious: the prediction, longer where it is less sure: what layouts are picked by.
        fitted: the profile was fitted to this very run.
    """

    sample: Sample
    predicted: float
    measured: float
    cautious: float
    fitted: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    @property
    def counts(self) -> bool:
        """Whether it is neither fitted nor marked as doubtful by its publisher."""
        return not self.fitted and not self.sample.configuration.notes.doubtful


@dataclass(frozen=True)
class Errors:
    """Errors of several predictions, as shares.

    Attributes:
        rows: how many.
        mape: mean of their magnitudes.
        median: of their magnitudes.
        worst: the largest magnitude.
        bias: mean with signs.
        line: of the row with the largest.
    """

    rows: int
    mape: float
    median: float
    worst: float
    bias: float
    line: int

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` has of it."""
        return {
            "rows": self.rows,
            "mape": self.mape,
            "median": self.median,
            "worst": self.worst,
            "bias": self.bias,
            "worst_line": self.line,
        }


@dataclass(frozen=True)
class Regret:
    """What it costs to run the layout that prediction ranks first, among several of one model on one machine.

    Attributes:
        name: of the group.
        rows: layouts in it.
        regret: measured time of the pick over that of the fastest, less one.
        picked, fastest: their lines.
    """

    name: str
    rows: int
    regret: float
    picked: int
    fastest: int


def judged(
    samples: Sequence[Sample], found: Sequence[Prediction], clusters: Mapping[str, Cluster], fitted: frozenset[int]
) -> list[Judged]:
    """Return predictions beside what was measured; `fitted` are lines of rows that were fitted."""
    return [
        Judged(
            sample=sample,
            predicted=one.value,
            measured=measured(sample, clusters[sample.configuration.cluster]),
            cautious=one.value * float(np.exp(one.spread)),
            fitted=bool(fitted & set(sample.lines)),
        )
        for sample, one in zip(samples, found, strict=True)
    ]


def errors(rows: Iterable[Judged]) -> Errors | None:
    """Return the errors of predictions, None where there is none."""
    listed = list(rows)
    if not listed:
        return None
    signed = np.array([row.error for row in listed])
    sizes = np.abs(signed)
    return Errors(
        rows=len(listed),
        mape=float(sizes.mean()),
        median=float(np.median(sizes)),
        worst=float(sizes.max()),
        bias=float(signed.mean()),
        line=listed[int(sizes.argmax())].sample.row.line,
    )


def by_source(rows: Iterable[Judged]) -> dict[str, list[Judged]]:
    """Return rows by the practice of their source and its machine; a source of no known practice stands for itself."""
    groups: dict[str, list[Judged]] = {}
    for row in rows:
        configuration = row.sample.configuration
        name = configuration.practice.name
        if not configuration.practice.sources:
            name = row.sample.row.text("source") or "no source"
        detail = _detail(row.sample)
        groups.setdefault(f"{name}{detail}, {configuration.cluster}", []).append(row)
    return dict(sorted(groups.items()))


def regrets(rows: Iterable[Judged]) -> list[Regret]:
    """Return the regret of each group of layouts of one model, batch, precision and number of GPUs in one source."""
    groups: dict[tuple[object, ...], list[Judged]] = {}
    for row in rows:
        one = row.sample.configuration
        model = one.model
        key = (
            row.sample.row.text("source"),
            one.cluster,
            one.precision,
            one.split.gpus,
            one.split.batch,
            model.name,
            (model.layers, model.hidden, model.heads, model.ffn, model.sequence),
        )
        groups.setdefault(key, []).append(row)
    return [_regret(group) for group in groups.values() if len({_layout(row) for row in group}) >= _LAYOUTS]


def _regret(group: Sequence[Judged]) -> Regret:
    picked = min(group, key=lambda row: row.cautious)
    fastest = min(group, key=lambda row: row.measured)
    one = picked.sample.configuration
    name = (
        f"{one.practice.name}: {one.model.name}, {one.model.layers} layers of {one.model.hidden}, "
        f"{one.split.gpus} x {one.cluster}, batch {one.split.batch}, line {min(row.sample.row.line for row in group)}"
    )
    return Regret(
        name=name,
        rows=len(group),
        regret=picked.measured / fastest.measured - 1,
        picked=picked.sample.row.line,
        fastest=fastest.sample.row.line,
    )


def _layout(row: Judged) -> tuple[object, ...]:
    one, split = row.sample.configuration, row.sample.configuration.split
    return (split.tp, split.pp, split.dp, split.cp, split.chunks, split.micro_batch, split.schedule, one.recompute)


def _detail(sample: Sample) -> str:
    """Return what tells parts of a source apart that are measured in different ways."""
    source = sample.row.text("source").lower()
    for part in ("ground_truth_multi", "ground_truth_single", "table 1", "table 2"):
        if part in source:
            return f" ({part.replace('ground_truth_', '')})"
    return ""
