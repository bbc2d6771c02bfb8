"""Callbacks that show a run on the terminal: a bar where it can be redrawn, plain lines where it cannot."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from paceline.train.callbacks import Callback, StartReport, StepReport, ValidationReport


def progress(console: Console) -> Callback:
    """Return the callback that fits the console."""
    return ProgressBar(console) if console.is_terminal else ProgressLines(console)


class ProgressBar(Callback):
    """Step, loss, tokens a second and time left, redrawn in place; validation losses stay above it."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            expand=True,
        )
        self._task: TaskID | None = None

    def on_start(self, report: StartReport) -> None:
        """Show the bar."""
        self._task = self._bar.add_task("", total=report.steps, completed=report.step, loss="-", speed="-")
        self._bar.start()

    def on_step(self, report: StepReport) -> None:
        """Move the bar."""
        if self._task is not None:
            speed = f"{report.tokens_per_s:,.0f} {report.unit}/s"
            self._bar.update(self._task, completed=report.step, loss=f"{report.loss:.4f}", speed=speed)

    def on_validate(self, report: ValidationReport) -> None:
        """Print a line above the bar."""
        self._bar.console.print(str(report), highlight=False)

    def close(self) -> None:
        """Give the terminal back."""
        self._bar.stop()


class ProgressLines(Callback):
    """A line at the first and last step and every `interval` seconds between."""

    def __init__(self, console: Console, interval: float = 5.0) -> None:
        self._console = console
        self._interval = interval
        self._begun_at = self._shown_at = 0.0
        self._first = 0

    def on_start(self, report: StartReport) -> None:
        """Note the time."""
        self._begun_at = time.monotonic()
        self._shown_at = -math.inf
        self._first = report.step

    def on_step(self, report: StepReport) -> None:
        """Print a line if one is due."""
        now = time.monotonic()
        if now - self._shown_at < self._interval and report.step < report.steps:
            return
        self._shown_at = now
        left = (report.steps - report.step) * (now - self._begun_at) / max(1, report.step - self._first)
        self._console.print(
            f"step {report.step}/{report.steps}  loss {report.loss:.4f}  {report.tokens_per_s:,.0f} {report.unit}/s  "
            f"{_minutes(left)} left",
            highlight=False,
        )

    def on_validate(self, report: ValidationReport) -> None:
        """Print a line."""
        self._console.print(str(report), highlight=False)


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
