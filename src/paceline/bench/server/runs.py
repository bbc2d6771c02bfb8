"""Whole runs with parameters on servers, by the command that a user gives, and how fast they went."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.errors import RecipeError
from paceline.train.metrics import read_metrics

COUNTED_FROM: Final = 1 / 3
"""The part of a run that goes to captures, caches and connections, and does not count."""

LIMIT_S: Final = 600.0


def samples_per_s(out: Path, recipe: Path, sets: Sequence[str], steps: int) -> float:
    """Train, and return the samples a second of the steps that count.

    Args:
        out: the run directory.
        recipe: with a section `server`.
        sets: assignments over it.
        steps: of the run.

    Raises:
        RecipeError: the run failed; the message ends with what it said.
    """
    command = [sys.executable, "-m", "paceline.cli.main", "train", str(recipe), "--out", str(out)]
    run = subprocess.run(
        [*command, *(word for text in sets for word in ("--set", text))],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if run.returncode:
        raise RecipeError(f"paceline train {recipe} ended with {run.returncode}:\n{run.stderr[-2000:]}")
    counted = read_metrics(out / "metrics.jsonl")[int(steps * COUNTED_FROM) :]
    samples, seconds = (sum(float(step[key]) for step in counted) for key in ("tokens", "step_s"))
    return samples / seconds
