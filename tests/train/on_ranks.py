"""Runs on ranks that fork from the tests' own server: what `paceline train` starts, in a tenth of the time."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.train import train_rank
from tests.ranks import ranks


def train_on(size: int, recipe: Path, out: Path, *overrides: str, resume: bool = False) -> None:
    """Train in `size` processes, each of which meets the others by itself."""
    arguments = {"recipe": str(recipe), "overrides": list(overrides), "run_dir": str(out), "resume": resume}
    ranks(size, joined=False)(_train)(arguments=arguments)


def _train(arguments: dict[str, object]) -> None:
    train_rank(arguments)
