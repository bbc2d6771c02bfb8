"""By what a run is known again, in this file or another one."""

from __future__ import annotations

from hashlib import sha256

from paceline.bench.predictions.notes import Notes
from paceline.bench.predictions.rows import Row

DIGITS = 16
"""Of an identity, hexadecimal."""
_NUMBERS = ("n_layers", "hidden", "heads", "seq_len", "gpus", "tp", "pp", "dp", "cp", "vpp", "micro_batch")
_WORDS = ("source", "system", "model", "gpu_type", "precision", "recompute")


def identity_of(row: Row, notes: Notes) -> str:
    """Return a short name for a configuration in a source: equal wherever the same run is told again.

    Measured values, their metrics and line numbers have no part in it.
    """
    words = [row.text(column).lower() for column in _WORDS]
    numbers = [_plain(row.text(column)) for column in (*_NUMBERS, "global_batch")]
    return sha256(repr((words, numbers, notes.schedule, notes.variant)).encode()).hexdigest()[:DIGITS]


def _plain(text: str) -> float | str | None:
    """Return a number where the text is one, so that 8 and 8.0 are the same, and None where there is none."""
    try:
        return float(text) if text else None
    except ValueError:
        return text
