"""What a rank does in its job, in a few words, for whoever tells of its end."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.runtime.job.world import JOB_DIRECTORY


def tell_role(role: str) -> None:
    """Leave word of what this process does, such as `stage 1`; nothing where no launcher of ours would read it."""
    directory = os.environ.get(JOB_DIRECTORY)
    if directory is not None:
        _path(Path(directory), int(os.environ["RANK"])).write_text(role, encoding="utf-8")


def role_of(directory: Path, rank: int) -> str:
    """Return what a rank said it does; empty where it said nothing."""
    path = _path(directory, rank)
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _path(directory: Path, rank: int) -> Path:
    return directory / f"role-{rank}"
