"""What is compared with predictions: each run once for its time, and once for each kind of memory that it tells.

A run that tells its time in several ways (seconds, tokens per second, FLOP/s, MFU) counts once, by the one that is
least derived: seconds, then tokens, samples, FLOP/s and last shares of a peak. Rows of one source with the same
configuration are one run as long as their metrics differ; where a metric comes again, another run begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.bench.predictions.configurations import Configuration, configuration_of
from paceline.bench.predictions.identity import identity_of
from paceline.bench.predictions.readings import Quantity, Reading, reading_of
from paceline.bench.predictions.rows import Row, Unusable

_ORDER = list(Quantity)


@dataclass(frozen=True)
class Sample:
    """One figure to predict.

    Attributes:
        row: that tells it.
        lines: of all rows that tell it, in some way.
        identity: by which the same configuration of the same source is known again.
        configuration: of the run.
        reading: what is told.
    """

    row: Row
    lines: tuple[int, ...]
    identity: str
    configuration: Configuration
    reading: Reading

    @property
    def is_memory(self) -> bool:
        """Whether it is bytes, not time."""
        return self.reading.quantity.is_memory


@dataclass(frozen=True)
class Samples:
    """What a file tells.

    Attributes:
        usable: what can be predicted.
        left_out: lines of rows that cannot, by reason.
    """

    usable: tuple[Sample, ...]
    left_out: dict[str, list[int]]


class _Run(NamedTuple):
    """What rows of the same run share."""

    identity: str
    memory: str
    number: int


def samples_of(rows: Sequence[Row]) -> Samples:
    """Return what rows tell, each run once, and which cannot be used for what reason."""
    left_out: dict[str, list[int]] = {}
    told: dict[_Run, list[Sample]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for row in rows:
        try:
            reading = reading_of(row)
            configuration = configuration_of(row)
        except Unusable as reason:
            left_out.setdefault(str(reason), []).append(row.line)
            continue
        identity = identity_of(row, configuration.notes)
        number = seen[identity, row.text("metric")]
        seen[identity, row.text("metric")] += 1
        run = _Run(identity, reading.quantity.name if reading.quantity.is_memory else "", number)
        told.setdefault(run, []).append(Sample(row, (row.line,), identity, configuration, reading))
    usable = [_least_derived(ways) for ways in told.values()]
    return Samples(tuple(sorted(usable, key=lambda sample: sample.row.line)), left_out)


def _least_derived(ways: Sequence[Sample]) -> Sample:
    """Return the way of telling a run that is closest to a measurement, configured as the longest notes have it."""
    best = min(ways, key=lambda sample: (_ORDER.index(sample.reading.quantity), sample.row.line))
    lines = tuple(sorted(sample.row.line for sample in ways))
    told = max(ways, key=lambda sample: len(sample.configuration.notes.text)).configuration
    configuration = replace(told, notes=best.configuration.notes)
    return Sample(best.row, lines, best.identity, configuration, best.reading)
