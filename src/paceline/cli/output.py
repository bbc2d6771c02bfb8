"""Where results go: run directories and JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from paceline.errors import RecipeError

# Written first by every run, so its presence tells a run directory from any other.
RUN_MARKER = "config.yaml"
_RUNS = Path("runs")


def new_run_dir(out: Path | None, name: str) -> Path:
    """Return an empty directory for a run, made now: `out`, or the next free `runs/NAME-N`.

    Raises:
        RecipeError: `out` already holds a run, or a directory cannot be made.
    """
    try:
        if out is not None:
            if (out / RUN_MARKER).exists():
                raise RecipeError(
                    f"{out} already holds a run; go on with it (--resume), or choose another directory (--out)."
                )
            out.mkdir(parents=True, exist_ok=True)
            return out
        _RUNS.mkdir(parents=True, exist_ok=True)
        number = max((n for n, _ in _numbered(_RUNS, name)), default=0) + 1
        while True:
            path = _RUNS / f"{name}-{number}"
            try:
                path.mkdir()
                return path
            except FileExistsError:  # another run took this number just now
                number += 1
    except OSError as error:
        raise RecipeError(f"the run directory cannot be made: {error}. Choose another with --out.") from error


def latest_run_dir(out: Path | None, name: str) -> Path:
    """Return the run to go on with: `out` itself, or the highest number among `NAME-N` in `out` or else `runs`.

    Raises:
        RecipeError: there is no such run.
    """
    if out is not None and (out / RUN_MARKER).exists():
        return out
    folder = _RUNS if out is None else out
    runs = [(n, path) for n, path in _numbered(folder, name) if (path / RUN_MARKER).exists()]
    if not runs:
        raise RecipeError(
            f"there is nothing to resume: neither is {folder} a run directory, nor does it hold a run {name}-N. "
            "Leave out --resume to start one, or name the run with --out."
        )
    return max(runs)[1]


def write_json(values: Mapping[str, Any], file: Path) -> None:
    """Write one JSON object to `file`, or to the standard output when `file` is `-`.

    Raises:
        RecipeError: the file cannot be written.
    """
    text = json.dumps(values, indent=2, allow_nan=False)
    if str(file) == "-":
        typer.echo(text)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"--json {file} cannot be written: {error}.") from error


def _numbered(folder: Path, name: str) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    matches = [(pattern.fullmatch(path.name), path) for path in entries if path.is_dir()]
    return [(int(match.group(1)), path) for match, path in matches if match]
