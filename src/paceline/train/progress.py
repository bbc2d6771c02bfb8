"""Callbacks that show a run on the terminal: a bar where it can be redrawn, plain lines where it cannot."""

from __future__ import annotations

import math
import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from paceline.train.callbacks import Callback, StartReport, StepReport, ValidationReport


def progress(console: Console) -> Callback:
    """Return the callback that fits the console."""
    return ProgressBar(console) if console.is_terminal else ProgressLines(console)


class Speed:
    """Tokens (or samples) a second of the last steps.

    One step says little: the last one of an epoch is small, and with servers several end at once.

    Args:
        over_s: seconds of steps that count.
    """

    def __init__(self, over_s: float = 5.0) -> None:
        self._over_s = over_s
        self._steps: deque[StepReport] = deque()
        self._weight = self._seconds = 0.0

    def after(self, report: StepReport) -> str:
        """Return the speed with a step that is done, such as `1,200 tokens/s`."""
        self._steps.append(report)
        self._weight += report.weight
        self._seconds += report.seconds
        while self._seconds - self._steps[0].seconds >= self._over_s and len(self._steps) > 1:
            first = self._steps.popleft()
            self._weight -= first.weight
            self._seconds -= first.seconds
        rate = self._weight / self._seconds if self._seconds > 0 else math.inf
        return f"{rate:,.0f} {report.unit}/s"


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
        self._speed = Speed()

    def on_start(self, report: StartReport) -> None:
        """Show the bar."""
        self._task = self._bar.add_task("", total=report.steps, completed=report.step, loss="-", speed="-")
        self._bar.start()

    def on_step(self, report: StepReport) -> None:
        """Move the bar."""
        speed = self._speed.after(report)
        if self._task is not None:
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
        self._speed = Speed(interval)

    def on_start(self, report: StartReport) -> None:
        """Note the time."""
        self._begun_at = time.monotonic()
        self._shown_at = -math.inf
        self._first = report.step

    def on_step(self, report: StepReport) -> None:
        """Print a line if one is due."""
        now, speed = time.monotonic(), self._speed.after(report)
        if now - self._shown_at < self._interval and report.step < report.steps:
            return
        self._shown_at = now
        left = (report.steps - report.step) * (now - self._begun_at) / max(1, report.step - self._first)
        self._console.print(
            f"step {report.step}/{report.steps}  loss {report.loss:.4f}  {speed}  {_minutes(left)} left",
            highlight=False,
        )

    def on_validate(self, report: ValidationReport) -> None:
        """Print a line."""
        self._console.print(str(report), highlight=False)


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
