"""Drawings as files: SVG by ourselves, PNG through matplotlib."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ScheduleError
from paceline.schedule.actions import Schedule
from paceline.schedule.draw.boxes import INK, LEGEND, UPDATE, boxes, colour_of, headline, ops_of, updates
from paceline.schedule.draw.svg import svg
from paceline.schedule.validate import Account


def save_picture(schedule: Schedule, account: Account, file: Path) -> None:
    """Write the drawing, in the form that the file's suffix says.

    Raises:
        ScheduleError: another suffix, matplotlib is not there, or the file cannot be written.
    """
    if file.suffix not in (".svg", ".png"):
        raise ScheduleError(f"{file} is no picture; a schedule is drawn as .svg or .png, or written as .json.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".svg":
            file.write_text(svg(schedule, account), encoding="utf-8")
        else:
            _save_png(schedule, account, file)
    except OSError as error:
        raise ScheduleError(f"the drawing {file} cannot be written: {error}.") from error


def _save_png(schedule: Schedule, account: Account, file: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ScheduleError(
            "drawing a PNG needs matplotlib: pip install paceline[viz]; a .svg needs nothing more."
        ) from error
    figure = Figure(figsize=(min(24.0, 2 + 0.3 * account.makespan), 1.2 + 0.35 * schedule.ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for box in boxes(schedule, account):
        length = box.end - box.start
        axes.barh(box.rank, length, left=box.start, height=0.8, color=box.colour, edgecolor="white", linewidth=0.6)
        if length:
            middle = box.start + length / 2
            axes.text(middle, box.rank, box.label, ha="center", va="center", color=INK, fontsize=7, clip_on=True)
    for rank, time in updates(schedule, account):
        axes.plot([time, time], [rank - 0.45, rank + 0.45], color=UPDATE, linewidth=1.5)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, account.makespan or 1)
    axes.set_title(f"{headline(schedule)}, bubble {account.bubble:.1%}", fontsize=10)
    patches = [Patch(color=colour_of(op), label=LEGEND[op]) for op in ops_of(schedule)]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(patches), fontsize=8)
    figure.savefig(file, dpi=150)
