"""By what a run is known again, in this file or another one."""

from __future__ import annotations

from hashlib import sha256

from paceline.bench.predictions.configurations import Configuration
from paceline.bench.predictions.rows import Row

# What of a source names a publication, and not where in a repository it was found or how it was extracted.
_DIGITS = 16


def identity_of(row: Row, configuration: Configuration) -> str:
    """Return a short name for a configuration in a source: equal wherever the same run is told again.

    Line numbers and measured values have no part in it, nor have columns that a configuration does not use.
    """
    split, model, notes = configuration.split, configuration.model, configuration.notes
    parts = (
        row.text("source"),
        row.text("system"),
        row.text("gpu_type").lower(),
        model,
        split,
        configuration.precision,
        row.text("precision").lower(),
        row.text("recompute").lower(),
        configuration.regions,
        configuration.zero,
        configuration.overlap,
        notes.schedule,
        notes.variant,
    )
    return sha256(repr(parts).encode()).hexdigest()[:_DIGITS]
