"""Servers and workers of a run, as a table: redrawn where the terminal can, and once at the end where it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.train.callbacks import Callback, EndReport, MembersReport, StartReport, StepReport, ValidationReport
from paceline.train.progress import Speed

_COLUMNS: Final = ("", "updates/s", "in", "out", "staleness", "queue", "lag", "memory")

_WIDTH: Final = 110


def members_table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with a row for each server and worker."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if not name or name == "staleness" else "right", no_wrap=True)
    for name, values in figures.items():
        rate = values.get("updates_per_s", values.get("pushes_per_s"))
        table.add_row(
            name,
            "-" if rate is None else f"{rate:,.1f}",
            _bytes(values.get("received_bytes")),
            _bytes(values.get("sent_bytes")),
            staleness_words(values.get("staleness") or {}),
            _count(values.get("queue", values.get("outstanding"))),
            _count(values.get("lag")),
            _bytes(values.get("memory_bytes")),
        )
    return table


def staleness_words(histogram: Mapping[str, int]) -> str:
    """Return a histogram of staleness, such as `0: 61 %, 1: 30 %, 2-3: 5 %, 4+: 4 %`."""
    total = sum(histogram.values())
    if not total:
        return "-"
    ordered = sorted((int(low), count) for low, count in histogram.items())
    shown = [f"{_bucket(low)}: {100 * count / total:.0f} %" for low, count in ordered[:3]]
    rest = sum(count for _, count in ordered[3:])
    return ", ".join([*shown, *([f"{ordered[3][0]}+: {100 * rest / total:.0f} %"] if rest else [])])


class MembersView(Callback):
    """A bar of the steps over the table.

    Args:
        console: a terminal that can be redrawn.
    """

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=40),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._live = Live(self._bar, console=console, refresh_per_second=4)
        self._task = self._bar.add_task("", total=1, loss="-", speed="-")
        self._speed = Speed()

    def on_start(self, report: StartReport) -> None:
        """Begin to draw."""
        self._bar.update(self._task, total=report.steps, completed=report.step)
        self._live.start()

    def on_step(self, report: StepReport) -> None:
        """Move the bar."""
        loss, speed = f"{report.loss:.4f}", self._speed.after(report)
        self._bar.update(self._task, completed=report.step, loss=loss, speed=speed)

    def on_validate(self, report: ValidationReport) -> None:
        """Print a line above."""
        self._live.console.print(str(report), highlight=False)

    def on_members(self, report: MembersReport) -> None:
        """Draw the table anew."""
        self._live.update(Group(self._bar, members_table(report.figures)))

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()


class MembersLines(Callback):
    """Prints the table at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._figures: Mapping[str, Mapping[str, Any]] = {}

    def on_members(self, report: MembersReport) -> None:
        """Keep the last figures."""
        self._figures = report.figures

    def on_end(self, report: EndReport) -> None:
        """Print them."""
        if self._figures:
            width = max(_WIDTH, self._console.width)  # a file takes long lines
            Console(file=self._console.file, width=width).print(members_table(self._figures))


def _bucket(low: int) -> str:
    return str(low) if low < 2 else f"{low}-{2 * low - 1}"


def _bytes(value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    size = float(value)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _count(value: Any) -> str:
    return "-" if value is None else f"{value:,}"
