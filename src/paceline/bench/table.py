"""How the results of a comparison are shown: a table for each model."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench.contestants import OPPONENT, Contestant
from paceline.bench.machine import warn_of_load


def print_tables(console: Console, result: dict[str, Any]) -> None:
    """Print what `data_parallel.main` returns."""
    machine, settings = result["machine"], result["settings"]
    console.print(
        f"{settings['ranks']} ranks, one thread each; ours on {machine['backend']}; {machine['cores']} cores of "
        f"{machine['processor']}; torch {machine['torch']}; {settings['rounds']} rounds of {settings['steps']} steps.",
        highlight=False,
    )
    warn_of_load(console, machine)
    for model, title in result["titles"].items():
        console.print(_table(result, model, title))
        start = result["start"].get(model)
        if start:
            cold, warm = start["cold"], start["warm"]
            console.print(
                f"start: {cold['total_s']:.2f} s the first time (capture {cold['capture_s']:.2f}, place "
                f"{cold['place_s']:.2f}), {warm['total_s']:.2f} s the second",
                highlight=False,
            )
        for who, reason in result["left_out"][model].items():
            console.print(f"left out: {who}: {reason}", highlight=False, markup=False)


def _table(result: dict[str, Any], model: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "backend", "step, ms", "passes, ms", "MiB a rank", "(start)", "ours / it", "passes only"):
        table.add_column(name, justify="left" if name in ("", "backend") else "right", no_wrap=True)
    memory = result["memory"].get(model, {})
    for who, times in result["step_s"][model].items():
        row = [
            who,
            result["backend"][model].get(who, ""),
            quartiles(times, 1e3, 1),
            f"{(times['median'] - times['optimizer']) * 1e3:.1f}",
        ]
        row += [mebibytes(memory[who][key]) for key in ("step_bytes", "start_bytes")] if who in memory else ["", ""]
        if who in result["ratios"][model]:
            found = {"median": result["ratios"][model][who], **result["spread"][model][who]}
            passes = result["forward_backward"][model][who]
            row += [f"{_short(OPPONENT[Contestant(who)])} {quartiles(found, 1, 2)}", f"{passes:.2f}"]
        table.add_row(*row)
    return table


def quartiles(found: dict[str, float], scale: float, digits: int) -> str:
    """Median, and the quartiles in brackets."""
    median, low, high = (f"{found[key] * scale:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def _short(ours: Contestant) -> str:
    return ours.removeprefix("paceline-")


def mebibytes(count: int) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.0f}"
