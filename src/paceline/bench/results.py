"""How the ranks of a benchmark hand over what they found: a file of each rank, in a folder of the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def leave(folder: str, rank: int, values: dict[str, Any]) -> None:
    """Write down what a rank found."""
    _file(Path(folder), rank).write_text(json.dumps(values), encoding="utf-8")


def found(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Return what each rank of a finished job left."""
    return [json.loads(_file(folder, rank).read_text(encoding="utf-8")) for rank in range(ranks)]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"
