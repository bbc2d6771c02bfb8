"""Drawings as SVG, which need nothing but text."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from paceline.schedule.actions import Schedule
from paceline.schedule.draw.boxes import INK, LEGEND, UPDATE, boxes, colour_of, headline, ops_of, stage_letters, updates
from paceline.schedule.validate import Account

# Pixels.
_WIDTH = 960  # of the time axis; a unit is at most _UNIT wide
_UNIT = 26.0
_ROW = 26
_LEFT = 64
_TOP = 34
_LETTER = 6.5  # about, of a label
_LEGEND_ITEM = 150


def svg(schedule: Schedule, account: Account) -> str:
    """Return the drawing; each box says its action to the pointer."""
    unit = min(_UNIT, _WIDTH / account.makespan) if account.makespan else _UNIT
    bottom = _TOP + _ROW * schedule.ranks
    width = max(_LEFT + unit * account.makespan + 12, _LEFT + _LEGEND_ITEM * (len(ops_of(schedule)) + 2))
    size = f"{_px(width)} {bottom + 40}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(headline(schedule))}</title>",
        f"<desc>A row for each rank, time from left to right; {account.bubble:.1%} of the time is idle.</desc>",
        f'<rect width="{_px(width)}" height="{bottom + 40}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="13" fill="{INK}">{escape(headline(schedule))}, '
        f"bubble {account.bubble:.1%}</text>",
        *_rows(schedule, account, unit),
        *_boxes(schedule, account, unit),
        *_updates(schedule, account, unit),
        *_legend(schedule, bottom + 24),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _rows(schedule: Schedule, account: Account, unit: float) -> Iterator[str]:
    for rank in range(schedule.ranks):
        y = _TOP + _ROW * rank
        yield (
            f'<rect x="{_LEFT}" y="{y + 2}" width="{_px(unit * account.makespan)}" height="{_ROW - 4}" fill="#efefef"/>'
            f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end" fill="{INK}">rank {rank}</text>'
        )


def _boxes(schedule: Schedule, account: Account, unit: float) -> Iterator[str]:
    for box in boxes(schedule, account):
        x, y, width = _LEFT + unit * box.start, _TOP + _ROW * box.rank + 2, unit * (box.end - box.start)
        label = ""
        if len(box.label) * _LETTER < width:
            middle = _px(x + width / 2)
            label = f'<text x="{middle}" y="{y + 15}" text-anchor="middle" fill="{INK}">{box.label}</text>'
        yield (
            f'<g><title>{escape(box.tip)}</title><rect x="{_px(x)}" y="{y}" width="{_px(width)}" height="{_ROW - 4}" '
            f'fill="{box.colour}" stroke="#ffffff"/>{label}</g>'
        )


def _updates(schedule: Schedule, account: Account, unit: float) -> Iterator[str]:
    for rank, time in updates(schedule, account):
        x, y = _px(_LEFT + unit * time), _TOP + _ROW * rank
        yield f'<path d="M{x} {y}v{_ROW}" stroke="{UPDATE}" stroke-width="2"/>'


def _legend(schedule: Schedule, y: int) -> Iterator[str]:
    x = _LEFT
    for op in ops_of(schedule):
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour_of(op)}"/>'
        yield f'<text x="{x + 15}" y="{y}" fill="{INK}">{LEGEND[op]}</text>'
        x += _LEGEND_ITEM
    if schedule.has_backward:
        yield f'<path d="M{x + 5} {y - 10}v12" stroke="{UPDATE}" stroke-width="2"/>'
        yield f'<text x="{x + 15}" y="{y}" fill="{INK}">update</text>'
        x += _LEGEND_ITEM
    if letters := stage_letters(schedule):
        yield f'<text x="{x}" y="{y}" fill="{INK}">{letters}</text>'


def _px(pixels: float) -> str:
    """Return a length without digits that nobody sees."""
    return f"{pixels:.2f}".rstrip("0").rstrip(".")
