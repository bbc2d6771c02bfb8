"""How a scaling measurement is shown."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench.machine import warn_of_load
from paceline.bench.table import quartiles

_TITLES = {"strong": "strong scaling: {batch} samples in all", "weak": "weak scaling: {batch} samples on each rank"}
_LAWS = {"strong": "Amdahl", "weak": "Gustafson"}


def print_tables(console: Console, result: dict[str, Any]) -> None:
    """Print what `scaling.main` returns."""
    machine, settings = result["machine"], result["settings"]
    rounds = settings["passes"] * settings["rounds"]
    console.print(
        f"{result['title']}; {settings['axis']}, one thread a rank; {machine['backend']}; {machine['cores']} cores of "
        f"{machine['processor']}; torch {machine['torch']}; {rounds} rounds of {settings['steps']} steps.",
        highlight=False,
    )
    warn_of_load(console, machine)
    if settings["ranks"][-1] > machine["cores"]:
        console.print(
            f"There are {machine['cores']} cores: more ranks share them, and that is no scaling.", highlight=False
        )
    console.print(f"the unmodified module on one rank: {quartiles(result['eager_s'], 1e3, 1)} ms", highlight=False)
    for kind in _LAWS:
        console.print(_table(result, kind))
        console.print(_told(result, kind), highlight=False)


def _table(result: dict[str, Any], kind: str) -> Table:
    found = result[kind]
    title = _TITLES[kind].format(batch=result["settings"]["batch"])
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("ranks", "step, ms", "speed-up", "efficiency", _LAWS[kind], ""):
        table.add_column(name, justify="right", no_wrap=True)
    for ranks, seconds in found["step_s"].items():
        speedup = found["speedup"][ranks]
        efficiency = f"{speedup['median'] / int(ranks):.0%}"
        table.add_row(ranks, quartiles(seconds, 1e3, 1), quartiles(speedup, 1, 2), efficiency, "", "measured")
    for ranks, predicted in found["predicted"].items():
        law = f"{predicted['speedup']:.3g} ({predicted['low']:.3g}-{predicted['high']:.3g})"
        table.add_row(ranks, "", "", f"{predicted['speedup'] / int(ranks):.0%}", law, "predicted")
    return table


def _told(result: dict[str, Any], kind: str) -> str:
    """The fraction, how sure it is, and what follows from it."""
    found = result[kind]
    fraction = found["fraction"]
    words = f"{_LAWS[kind]}'s serial fraction: {fraction['value']:.3f} ({fraction['low']:.3f}-{fraction['high']:.3f})"
    if kind == "strong":
        limit = found["limit"]
        most = "none" if limit["value"] is None else f"{limit['value']:.3g}"
        high = "none" if limit["high"] is None else f"{limit['high']:.3g}"
        low = "none" if limit["low"] is None else f"{limit['low']:.3g}"
        words += f"; limit of the speed-up: {most} ({low}-{high})"
    if found["residual"] is None:
        return f"{words}; two numbers of ranks determine it, and nothing is left to check the law with"
    return f"{words}; the law is within {found['residual']:.1%} of each measurement"
