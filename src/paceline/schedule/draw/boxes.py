"""What all drawings show: boxes in time, and how they are named and coloured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.schedule.actions import Op, Schedule
from paceline.schedule.validate import Account

_COLOURS = {
    Op.FORWARD: (0x4C, 0x8E, 0xDA),
    Op.BACKWARD: (0x4F, 0xA8, 0x6A),
    Op.BACKWARD_INPUT: (0x2F, 0xA4, 0xA0),
    Op.BACKWARD_WEIGHT: (0xD9, 0x9A, 0x3C),
}

INK = "#1b1b1b"
UPDATE = "#c0392b"
LEGEND = {
    Op.FORWARD: "F forward",
    Op.BACKWARD: "B backward",
    Op.BACKWARD_INPUT: "I backward, inputs",
    Op.BACKWARD_WEIGHT: "W backward, weights",
}


@dataclass(frozen=True)
class Box:
    """A computation in time.

    Attributes:
        label: its micro-batch, and a letter for the stage where its rank has several: a, b, ...
        tip: the action in words.
    """

    op: Op
    rank: int
    start: float
    end: float
    label: str
    colour: str
    tip: str


def boxes(schedule: Schedule, account: Account) -> Iterator[Box]:
    """Yield the boxes of a schedule, rank by rank."""
    for rank, (actions, times) in enumerate(zip(schedule.actions, account.times, strict=True)):
        stages = schedule.stages_of(rank)
        for action, (start, end) in zip(actions, times, strict=True):
            if action.op.is_compute:
                chunk = stages.index(action.stage)
                letter = _letter(chunk) if len(stages) > 1 else ""
                label = f"{action.micro_batch}{letter}"
                colour = colour_of(action.op, chunk / len(stages))
                yield Box(action.op, rank, start, end, label, colour, str(action))


def updates(schedule: Schedule, account: Account) -> Iterator[tuple[int, float]]:
    """Yield the rank and time of each update."""
    for rank, (actions, times) in enumerate(zip(schedule.actions, account.times, strict=True)):
        for action, (_, end) in zip(actions, times, strict=True):
            if action.op is Op.UPDATE:
                yield rank, end


def colour_of(op: Op, lighter: float = 0.0) -> str:
    """Return the colour of a computation as `#rrggbb`; stages after the first of a rank are `lighter`."""
    return "#" + "".join(f"{round(part + (255 - part) * lighter * 0.7):02x}" for part in _COLOURS[op])


def ops_of(schedule: Schedule) -> list[Op]:
    """Return the computations that a schedule has, in the order of a legend."""
    there = {action.op for action in schedule.everything()}
    return [op for op in LEGEND if op in there]


def stage_letters(schedule: Schedule) -> str:
    """Return what the letters of labels mean, or nothing where there are none."""
    most = max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))
    return f"{', '.join(map(_letter, range(most)))}: stages of a rank" if most > 1 else ""


def headline(schedule: Schedule) -> str:
    """Return one line that says what is drawn."""
    stages = f"{schedule.stages} stages on {schedule.ranks} rank{'s' if schedule.ranks > 1 else ''}"
    return f"{schedule.name}: {stages}, {schedule.micro_batches} micro-batches"


def _letter(chunk: int) -> str:
    """Return a, b, ..., z, aa, ab, ..."""
    return (_letter(chunk // 26 - 1) if chunk >= 26 else "") + chr(ord("a") + chunk % 26)
