"""What workers did, as lines of JSON in the run's directory; the supervisor makes steps and curves of them.

    {"begun": 3, "threads": 2}
    {"task": 7, "loss": 0.41, "weight": 32.0, "read_s": ..., "compute_s": ..., "push_s": ..., "alone": false}
    {"evaluation": 10, "loss": 0.38, "weight": 500.0, "seconds": 0.2, "metrics": {"auc": 0.9}}

A line is written at once, so that what a worker that was killed had done is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from paceline.errors import ExchangeError
from paceline.train.servers.worker.reports import EvaluationReport, Listener, TaskReport


class RecordFile(Listener):
    """Writes what one worker did.

    Args:
        path: of the file, which is appended to.
        worker: its number.
    """

    def __init__(self, path: Path, worker: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)
        # How many threads there are decides in which order kernels add up: a replay needs as many.
        self._write({"begun": worker, "threads": torch.get_num_threads()})

    def on_task(self, report: TaskReport) -> None:
        """Write a line.

        Raises:
            ExchangeError: there is no room for it.
        """
        self._write(asdict(report))

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Write a line."""
        values = asdict(report)
        self._write({"evaluation": values.pop("clock"), **values})

    def close(self) -> None:
        """Write no more."""
        with suppress(OSError):  # a line that could not be written, which was said then
            self._file.close()

    def _write(self, values: dict[str, Any]) -> None:
        # NaN is a word that JSON lacks: a loss that is a mean over nothing is null.
        try:
            self._file.write(json.dumps(_plain(values)) + "\n")
        except OSError as error:
            raise ExchangeError(
                f"cannot write {self._path} ({error.strerror}); without it nobody knows what this worker did: make "
                "room, and go on with --resume."
            ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def threads_of(path: Path) -> int:
    """Return how many threads a worker computed with; as many as there are now where it left no word."""
    if not path.exists():
        return torch.get_num_threads()
    with path.open(encoding="utf-8") as lines:
        return int(json.loads(next(lines))["threads"])


class RecordReader:
    """Reads what workers wrote since it last looked; files may come up at any time.

    Args:
        folders: of the files.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = list(folders)
        self._files: dict[Path, IO[str]] = {}
        self._rest: dict[Path, str] = {}

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield new lines; one that is not whole yet is left for later."""
        for path in sorted(path for folder in self._folders for path in folder.glob("worker-*.jsonl")):
            if path not in self._files:
                self._files[path] = path.open(encoding="utf-8")
                self._rest[path] = ""
            *lines, self._rest[path] = (self._rest[path] + self._files[path].read()).split("\n")
            yield from map(json.loads, lines)

    def close(self) -> None:
        """Read no more."""
        for file in self._files.values():
            file.close()
