"""How sections and tables look on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.planner import words

_BETWEEN, _NARROWEST = 3, 20
"""Characters between columns, and the fewest that names get."""
_NUMBERS = {
    *("bytes", "tensors", "collectives", "modelled cost", "proven bound", "classes", "variables", "calls", "took"),
    *("stage", "ranks", "time", "parameters", "kept", "in flight", "held", "sends", "samples/s"),
    *("compute", "update", "launching", "activations", "other"),
    *("step", "tokens/s", "MFU", "memory", "bubble", "exposed", "$/Mtoken", "gradients", "optimizer", "on a rank"),
}


def section(console: Console, title: str) -> None:
    """Print the title of a section."""
    console.print()
    console.print(title, style="bold", highlight=False, markup=False)


def say(console: Console, text: str) -> None:
    """Print text as it is."""
    console.print(text, highlight=False, markup=False)


def print_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column, of names, is broken at dots where the others leave too little room."""
    listed = [tuple(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    widths = [max(map(len, cells)) for cells in zip(columns, *listed, strict=True)]
    room = max(_NARROWEST, console.width - sum(widths[1:]) - _BETWEEN * (len(columns) - 1))
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column in _NUMBERS else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=number > 0, highlight=False)
    for name, *cells in listed:
        table.add_row(words.broken(name, room), *cells)
    console.print(table, markup=False)
