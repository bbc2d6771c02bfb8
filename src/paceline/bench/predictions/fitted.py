"""Which rows profiles are fitted to: those that `--fit-rows` names, or those that the shipped profiles were."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench.predictions.identity import DIGITS
from paceline.bench.predictions.likely import with_likely_micro_batches
from paceline.bench.predictions.measured import measured
from paceline.bench.predictions.predicted import described, grouped
from paceline.bench.predictions.profiles import shipped_identities
from paceline.bench.predictions.samples import Sample
from paceline.cluster.cluster import Cluster
from paceline.cluster.rates import Rates
from paceline.errors import DataError
from paceline.simulator.closed_form.fitting import PRIORS, Fitted, Measured, fit, with_rates

NONE = "none"
_HOLD = 0.025
"""Weight of priors for each row: what limits a fit to many rows is its form, against which priors hold."""
_HOLD_MOST = 2.0


@dataclass(frozen=True)
class Profiles:
    """Clusters to predict on, and what they were fitted to.

    Attributes:
        clusters: by their names.
        lines: of rows that were fitted.
        fits: by kind of device, what a fit of this run found; empty where the shipped profiles are used.
        rows: by kind of device, what it was fitted to.
    """

    clusters: Mapping[str, Cluster]
    lines: frozenset[int]
    fits: Mapping[str, Fitted]
    rows: Mapping[str, Sequence[Sample]]


def chosen_lines(given: str | None, samples: Sequence[Sample]) -> frozenset[int] | None:
    """Return the lines of rows to fit, None where shipped profiles are to be used.

    `given` is `none`, numbers and ranges of lines as in `2,66-89`, or a file with such numbers or with identities,
    separated by commas or line ends; what follows a `#` is a comment.

    Raises:
        DataError: it cannot be read, or names a line that no usable row of time stands on.
    """
    if given is None:
        return None
    if given.strip().lower() == NONE:
        return frozenset()
    words = _words(given)
    times = [sample for sample in samples if not sample.is_memory]
    by_identity: dict[str, set[int]] = {}
    for sample in times:
        by_identity.setdefault(sample.identity, set()).update(sample.lines)
    usable = {line for sample in times for line in sample.lines}
    lines: set[int] = set()
    for word in words:
        if re.fullmatch(r"\d+(-\d+)?", word) and len(word) < DIGITS:
            first, _, last = word.partition("-")
            wanted = range(int(first), int(last or first) + 1)
            found = usable & set(wanted)
            if not found:
                raise DataError(f"--fit-rows {word}: no row there tells the time of a step that can be predicted.")
            lines |= found
        elif re.fullmatch(rf"[0-9a-f]{{{DIGITS}}}", word):
            lines |= by_identity.get(word, set())
        else:
            raise DataError(
                f"--fit-rows has '{word}'; it takes lines and ranges of them, as in 2,66-89, a file of such, or none."
            )
    return frozenset(lines)


def _words(given: str) -> list[str]:
    """Return the words of a list, or of the file that it names."""
    text = given
    if not re.fullmatch(r"[\d\s,-]+", given):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"--fit-rows {given}: it is no list of lines such as 2,66-89, not 'none', and no file that can be read "
                f"({error})."
            ) from error
    words = []
    for line in text.splitlines():
        content = line.split("#")[0]
        first = content.split()[:1]
        if first and re.fullmatch(rf"[0-9a-f]{{{DIGITS}}}", first[0]):
            words.append(first[0])  # an identity, and what it is called
        else:
            words += [word for word in re.split(r"[\s,]+", content) if word]
    return words


def profiles(samples: Sequence[Sample], clusters: Mapping[str, Cluster], lines: frozenset[int] | None) -> Profiles:
    """Return clusters with the rates to predict with: those that are shipped, or fitted to the rows on these lines.

    Clusters with the same kind of device share one profile, to which all chosen rows on any of them are fitted.
    """
    known = shipped_identities()
    shipped = [sample for sample in samples if sample.identity in known and not sample.is_memory]
    if lines is None:
        return Profiles(clusters, _lines(shipped), {}, {})
    if not lines:
        return Profiles({name: _unfitted(cluster) for name, cluster in clusters.items()}, frozenset(), {}, {})
    chosen = [sample for sample in samples if not sample.is_memory and lines & set(sample.lines)]
    changed, fits, fitted_to = dict(clusters), {}, {}
    for device in sorted({cluster.slowest.device.name for cluster in clusters.values()}):
        mine = {name for name, cluster in clusters.items() if cluster.slowest.device.name == device}
        rows = [sample for sample in chosen if sample.configuration.cluster in mine]
        if not rows:
            continue
        start = clusters[min(mine)].slowest.device.rates
        fitted_to[device] = rows
        likely = with_likely_micro_batches(rows, clusters)
        fits[device] = fit(to_fit(likely, clusters), start, hold=min(_HOLD * len(rows), _HOLD_MOST))
        for name in mine:
            changed[name] = with_rates(changed[name], fits[device].rates)
    # devices of which no row was named keep their shipped profiles, whose fitted rows are no test of them either
    kept = [one for one in shipped if clusters[one.configuration.cluster].slowest.device.name not in fits]
    fitted = _lines(chosen) | _lines(kept)
    return Profiles(changed, fitted, fits, fitted_to)


def _lines(samples: Iterable[Sample]) -> frozenset[int]:
    return frozenset(line for sample in samples for line in sample.lines)


def _unfitted(cluster: Cluster) -> Cluster:
    """Return a cluster with the rates that are expected of its devices before any row is seen."""
    expected: dict[str, Any] = {name: prior.centre for name, prior in PRIORS.items()}
    return with_rates(cluster, replace(Rates(units=cluster.slowest.device.rates.units), **expected))


def to_fit(samples: Sequence[Sample], clusters: Mapping[str, Cluster]) -> list[Measured]:
    """Return samples as what rates are fitted to."""
    found = []
    for chosen in grouped(samples):
        rows = [samples[index] for index in chosen]
        workload, layouts = described([row.configuration for row in rows])
        cluster = clusters[rows[0].configuration.cluster]
        seconds = [measured(row, cluster) for row in rows]
        names = tuple(f"line {row.row.line}" for row in rows)
        found.append(Measured(names, workload, layouts, cluster, np.array(seconds)))
    return found
