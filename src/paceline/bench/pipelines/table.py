"""How the results of the pipelines benchmark are shown: tables of times, of bubbles, and of activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench.groups import GLOO
from paceline.bench.machine import warn_of_load
from paceline.bench.table import mebibytes


def print_tables(console: Console, result: Mapping[str, Any]) -> None:
    """Print what `pipelines.main` returns."""
    machine, settings = result["machine"], result["settings"]
    console.print(
        f"{settings['ranks']} ranks, one thread each; ours on {machine['backend']}; {machine['cores']} cores of "
        f"{machine['processor']}; torch {machine['torch']}; {settings['rounds']} rounds of {settings['steps']} steps.",
        highlight=False,
    )
    warn_of_load(console, machine)
    for model, title in result["titles"].items():
        of_model = {key: found[model] for key, found in result.items() if model in found}
        console.print(_steps(of_model, title))
        console.print(_ratios(of_model))
        console.print(_bubbles(of_model))
        console.print(_activations(of_model))
        for who, reason in of_model["left_out"].items():
            console.print(f"left out: {who}: {reason}", highlight=False, markup=False)


def ratio(found: Mapping[str, float]) -> list[str]:
    """Return median, lower quartile, minimum, and the ratio of the fastest rounds."""
    return [f"{found[key]:.2f}" for key in ("median", "low", "min", "fastest")]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="right" if name and name != "against" else "left", no_wrap=True)
    return table


def _steps(result: Mapping[str, Any], title: str) -> Table:
    table = _table(title, "", "backend", "step, ms", "low", "min", "optimizer, ms", "MiB a rank")
    for who, times in result["step_s"].items():
        row = [f"{times[key] * 1e3:.1f}" for key in ("median", "low", "min", "optimizer")]
        memory = result["memory"].get(who)
        table.add_row(who, result["backend"].get(who, ""), *row, mebibytes(memory["step_bytes"]) if memory else "")
    return table


def _ratios(result: Mapping[str, Any]) -> Table:
    table = _table("ours / it", "", "against", "median", "low", "min", "fastest")
    for schedule in result["bound"]:
        for name, found in against(result, schedule):
            table.add_row(schedule, name, *ratio(found))
    return table


def against(result: Mapping[str, Any], schedule: str) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield what one of ours is compared with, and how it compares."""
    for peer in (f"torch-{schedule}", f"torch-{schedule}-{GLOO}"):
        if peer in result["spread"]:
            yield f"torch{', both on Gloo' if peer.endswith(GLOO) else ''}", result["spread"][peer]
    yield "serial / ranks / (1 - bubble)", result["bound"][schedule]
    yield "the same without communication", result["control"][schedule]


def _bubbles(result: Mapping[str, Any]) -> Table:
    names = ("formula", "of durations", "measured", "low", "min", "sending", "waiting")
    table = _table("bubble, % of all ranks' time", "", *names)
    keys = ("formula", "of_durations", "median", "low", "min", "sending", "receiving")
    for schedule, found in result["bubble"].items():
        table.add_row(schedule, *(f"{found[key] * 100:.1f}" for key in keys))
    return table


def _activations(result: Mapping[str, Any]) -> Table:
    table = _table("activations in flight by stage, MiB", "", "micro-batches", "predicted", "measured")
    for schedule, found in result["activations"].items():
        sizes = [", ".join(f"{count / 2**20:.1f}" for count in found[key]) for key in ("predicted", "measured")]
        table.add_row(schedule, ", ".join(map(str, found["micro_batches"])), *sizes)
    return table
