"""How the results of the operators benchmark are shown: a table for each model."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench.groups import GLOO
from paceline.bench.machine import warn_of_load
from paceline.bench.operators.contestants import Contestant, mesh_of, opponent
from paceline.bench.operators.workloads import Model
from paceline.bench.table import mebibytes, quartiles


def print_tables(console: Console, result: dict[str, Any]) -> None:
    """Print what `operators.main` returns."""
    machine, settings = result["machine"], result["settings"]
    console.print(
        f"{settings['ranks']} ranks, one thread each; ours on {machine['backend']}; {machine['cores']} cores of "
        f"{machine['processor']}; torch {machine['torch']}; {settings['rounds']} rounds of {settings['steps']} steps.",
        highlight=False,
    )
    warn_of_load(console, machine)
    for model, title in result["titles"].items():
        console.print(_table(result, model, title))
        if model in result["gloo"]:
            console.print(_on_gloo(result, model))
        for who, start in result["start"][model].items():
            console.print(
                f"start of {who}: {start['total_s']:.2f} s (capture {start['capture_s']:.2f}, place "
                f"{start['place_s']:.2f})",
                highlight=False,
            )
        for who, reason in result["left_out"][model].items():
            console.print(f"left out: {who}: {reason}", highlight=False, markup=False)


def _table(result: dict[str, Any], model: str, title: str) -> Table:
    ranks = result["settings"]["ranks"]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "backend", "step, ms", "MiB a rank", "(activations)", "ours / it"):
        table.add_column(name, justify="left" if name in ("", "backend") else "right", no_wrap=True)
    memory, activations = result["memory"].get(model, {}), result["activations"].get(model, {})
    for who, times in result["step_s"][model].items():
        row = [who, result["backend"][model].get(who, ""), quartiles(times, 1e3, 1)]
        row += [mebibytes(memory[who]["step_bytes"]), _of_serial(activations[who])] if who in memory else ["", ""]
        if who in result["ratios"][model]:
            row += [f"{_mesh(who, model, ranks)} {_ratio(result, model, who)}"]
        table.add_row(*row)
    return table


def _on_gloo(result: dict[str, Any], model: str) -> Table:
    ranks = result["settings"]["ranks"]
    table = Table(title="on Gloo alone, ours too", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "step, ms", "ours / it"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for who, times in result["gloo"][model]["step_s"].items():
        key = f"{who}-{GLOO}"
        compared = key in result["ratios"][model]
        ratio = [f"{_mesh(who, model, ranks)} {_ratio(result, model, key)}"] if compared else []
        table.add_row(who, quartiles(times, 1e3, 1), *ratio)
    return table


def _mesh(peer: str, model: str, ranks: int) -> str:
    return str(mesh_of(opponent(Contestant(peer), Model(model), ranks), ranks))


def _ratio(result: dict[str, Any], model: str, key: str) -> str:
    return quartiles({"median": result["ratios"][model][key], **result["spread"][model][key]}, 1, 2)


def _of_serial(activations: dict[str, float]) -> str:
    part = f" ({activations['of_serial']:.2f})" if "of_serial" in activations else ""
    return f"{mebibytes(int(activations['bytes']))}{part}"
