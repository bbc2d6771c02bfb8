"""Drawings for the terminal: a line for each rank, a cell for each unit of time."""

from __future__ import annotations

from rich.text import Text

from paceline.schedule.actions import Schedule
from paceline.schedule.draw.boxes import LEGEND, boxes, colour_of, ops_of, stage_letters
from paceline.schedule.validate import Account

# A drawing with as many cells as this says nothing to the eye, and units far below the shortest action make many.
_MOST_CELLS = 4000


def staves(schedule: Schedule, account: Account, width: int) -> Text:
    """Return the drawing in lines of at most `width`; what is longer goes on below, like staves of music.

    Each box begins with its letter, so that it can be read without colours.
    """
    drawn = list(boxes(schedule, account))
    cells = round(account.makespan)
    if cells > _MOST_CELLS:
        return Text(f"(too long to draw here: {cells} units of time; -o FILE.svg draws it)")
    cell = 1 + max(len(box.op.value + box.label) for box in drawn)
    margin = len(f"rank {schedule.ranks - 1} ")
    lines = [Text() for _ in schedule.actions]
    for box in drawn:
        line = lines[box.rank]
        line.append(" " * (cell * round(box.start) - len(line)))
        room = cell * (round(box.end) - round(box.start)) - 1
        if room > 0:
            line.append(f"{box.op.value}{box.label}"[:room].ljust(room, "─"), style=f"black on {box.colour}").append(
                " "
            )
    per_stave = max(1, (width - margin) // cell)
    text = Text()
    for first in range(0, max(cells, 1), per_stave):
        for rank, line in enumerate(lines):
            piece = line[cell * first : cell * (first + per_stave)]
            text.append(f"rank {rank}".ljust(margin)).append_text(piece).rstrip()
            text.append("\n")
        text.append("\n")
    return text.append_text(_legend(schedule))


def _legend(schedule: Schedule) -> Text:
    text = Text()
    for op in ops_of(schedule):
        text.append(f" {LEGEND[op]} ", style=f"black on {colour_of(op)}").append(" ")
    return text.append(stage_letters(schedule))
