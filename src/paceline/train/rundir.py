"""The run directory: what is where, and the log of every rank.

    config.yaml          the recipe with all defaults, ready to be trained from again
    plan.yaml            the plan that executes
    prediction.json      what a step was predicted to take, beside what it took
    metrics.jsonl        a line for every step and validation
    tensorboard/         the same for TensorBoard
    logs/rank-N.log      what each rank did
    checkpoints/         see `train.checkpoint`
    traces/rank-N.json   what each rank did in the steps of `train.trace`, for ui.perfetto.dev
    model.safetensors    the trained module's state dict, under its own names
    versions/            of an asynchronous pipeline: which versions of its weights each stage read
    sample.txt           what it wrote, if the recipe asks for a sample

Knows names and files, not what is written to them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import Logger
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run."""

    root: Path

    @property
    def config(self) -> Path:
        """The recipe."""
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        """The plan that executes."""
        return self.root / "plan.yaml"

    @property
    def prediction(self) -> Path:
        """See `train.prediction`."""
        return self.root / "prediction.json"

    @property
    def metrics(self) -> Path:
        """See `train.metrics.MetricsFile`."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Events."""
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.root / "checkpoints"

    def versions(self, rank: int) -> Path:
        """Which versions of its weights a rank of an asynchronous pipeline read and made."""
        return self.root / "versions" / f"rank-{rank}.jsonl"

    def trace(self, rank: int) -> Path:
        """What a rank did in some steps."""
        return self.root / "traces" / f"rank-{rank}.json"

    @property
    def model(self) -> Path:
        """The trained module."""
        return self.root / "model.safetensors"

    @property
    def sample(self) -> Path:
        """What the trained module wrote."""
        return self.root / "sample.txt"

    def log(self, rank: int) -> Path:
        """The log of a rank."""
        return self.root / "logs" / f"rank-{rank}.log"

    @contextmanager
    def logging(self, rank: int) -> Iterator[logging.Logger]:
        """Append what this package logs to the rank's file, for the time of the context.

        Our launcher has that file open too, for what the rank prints and for its traceback; both append.
        """
        with self.logging_to(self.log(rank), f"rank {rank} ") as log:
            yield log

    @contextmanager
    def logging_to(self, path: Path, who: str = "") -> Iterator[Logger]:
        """Append what this package logs to a file, for the time of the context."""
        log = logging.getLogger("paceline")
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
        handler.setFormatter(logging.Formatter(f"%(asctime)s {who}%(levelname)s %(name)s: %(message)s"))
        before = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield log
        finally:
            log.setLevel(before)
            log.removeHandler(handler)
            handler.close()


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that no reader ever sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
