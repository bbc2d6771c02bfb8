"""Callbacks that write a run's figures to files: `metrics.jsonl`, TensorBoard events, the log.

Each is given to one rank or to all by whoever builds the run; none of them knows about ranks.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.train.callbacks import (
    Callback,
    CheckpointReport,
    EndReport,
    MembersReport,
    StartReport,
    StepReport,
    ValidationReport,
)


class MetricsFile(Callback):
    """One JSON object per line, flushed at once: `{"event": "step", ...}` and `{"event": "validation", ...}`.

    With parameters on servers also `{"event": "members", "step": ..., "members": {"server-0": {...}, ...}}`.

    Units: seconds, bytes, tokens (samples for a loss that is a mean over samples). A resumed run drops the lines of
    steps that it is about to do again, so that each step stands in the file once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def on_start(self, report: StartReport) -> None:
        """Open the file."""
        kept = [line for line in self._lines() if _step_of(line) <= report.step] if report.step else []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w", encoding="utf-8")
        self._file.writelines(f"{line}\n" for line in kept)
        self._file.flush()

    def on_step(self, report: StepReport) -> None:
        """Write a line."""
        self._write(
            event="step",
            step=report.step,
            loss=report.loss,
            lr=report.learning_rate,
            grad_norm=report.grad_norm,
            tokens=report.weight,
            tokens_per_s=round(report.tokens_per_s, 1),
            step_s=round(report.seconds, 6),
            peak_memory_bytes=report.peak_memory,
        )

    def on_validate(self, report: ValidationReport) -> None:
        """Write a line."""
        self._write(
            event="validation",
            step=report.step,
            loss=report.loss,
            tokens=report.weight,
            seconds=round(report.seconds, 6),
            **report.metrics,
        )

    def on_members(self, report: MembersReport) -> None:
        """Write a line."""
        self._write(event="members", step=report.step, members={name: dict(v) for name, v in report.figures.items()})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, **values: object) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def _lines(self) -> list[str]:
        return self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []


def _step_of(line: str) -> float:
    """The step a line belongs to; infinite for one that was cut off when its writer was killed."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def read_metrics(path: Path, event: str = "step") -> list[dict[str, Any]]:
    """Return the objects of one kind in a `metrics.jsonl`, in order; a line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if math.isfinite(_step_of(line))]
    return [row for row in rows if row["event"] == event]


class TensorBoard(Callback):
    """Scalars for TensorBoard. Without the package it says how to get it, once, and does nothing."""

    def __init__(self, directory: Path, log: logging.Logger) -> None:
        self._directory = directory
        self._log = log
        self._writer: Any = None

    def on_start(self, report: StartReport) -> None:
        """Open an event file; a resumed run hides the events of steps that it does again."""
        try:
            # Imported here because it takes a second and is optional.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._log.info("no TensorBoard events: the package is missing (pip install 'paceline[viz]').")
            return
        purge = report.step + 1 if report.step else None
        self._writer = SummaryWriter(str(self._directory), purge_step=purge)

    def on_step(self, report: StepReport) -> None:
        """Write the figures of a step."""
        self._scalars(
            report.step,
            {
                "train/loss": report.loss,
                "train/learning_rate": report.learning_rate,
                "train/grad_norm": report.grad_norm,
                "speed/tokens_per_s": report.tokens_per_s,
                "speed/step_s": report.seconds,
                "memory/peak_bytes": report.peak_memory,
            },
        )

    def on_validate(self, report: ValidationReport) -> None:
        """Write the validation loss, and metrics."""
        found = {"loss": report.loss, **report.metrics}
        self._scalars(report.step, {f"validation/{name}": value for name, value in found.items()})

    def on_members(self, report: MembersReport) -> None:
        """Write figures of servers and workers."""
        for name, figures in report.figures.items():
            numbers = {key: value for key, value in figures.items() if isinstance(value, int | float)}
            self._scalars(report.step, {f"{name}/{key}": value for key, value in numbers.items()})

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        if self._writer is None:
            return
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, step)


class LogLines(Callback):
    """A line in the log for every event; of the steps, for every `every`th."""

    def __init__(self, log: logging.Logger, every: int = 10) -> None:
        self._log = log
        self._every = every

    def on_start(self, report: StartReport) -> None:
        """Log the length of the run."""
        self._log.info("training from step %d to %d, %d parameters", report.step, report.steps, report.parameters)

    def on_step(self, report: StepReport) -> None:
        """Log the figures of a step, if it is due."""
        if report.step % self._every and report.step != report.steps:
            return
        self._log.info(
            "step %d loss %.6g gradient norm %s rate %.4g in %.3f s, peak memory %d bytes",
            report.step,
            report.loss,
            "none" if report.grad_norm is None else f"{report.grad_norm:.4g}",
            report.learning_rate,
            report.seconds,
            report.peak_memory,
        )

    def on_validate(self, report: ValidationReport) -> None:
        """Log the validation loss."""
        found = "".join(f" {name} {value:.6g}" for name, value in report.metrics.items())
        self._log.info("step %d validation loss %.6g%s in %.2f s", report.step, report.loss, found, report.seconds)

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Log that a checkpoint is being saved."""
        self._log.info("step %d checkpoint handed over in %.3f s", report.step, report.seconds)

    def on_end(self, report: EndReport) -> None:
        """Log how the run ended."""
        why = f", stopped by signal {report.signal}" if report.signal else ""
        self._log.info("ended after step %d of %d, %.1f s%s", report.step, report.steps, report.seconds, why)
