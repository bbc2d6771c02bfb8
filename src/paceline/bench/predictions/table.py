"""How predictions beside published runs are printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_REASONS = 40
_GROUPS = 12
_FITTED = 30


def print_tables(console: Console, result: Mapping[str, Any]) -> None:
    """Print what `predictions.result_of` returns."""
    read = result["read"]
    console.print(f"{read['rows']} rows, of which {read['predicted']} are predicted.", highlight=False)
    if read["unknown_columns"]:
        _line(console, f"columns that are not known, and not read: {', '.join(read['unknown_columns'])}")
    for title, compared in (("Step times", result), ("Memory", result["memory"])):
        if compared["by_source"]:
            console.print(_errors(f"{title}, rows never fitted", compared["by_source"], compared["all"]))
        if compared["fitted"]:
            console.print(_errors(f"{title}, fitted rows, for comparison", compared["fitted"], None))
        if compared["doubtful"]["rows"]:
            console.print(_errors(f"{title}, marked as doubtful by who published them", {}, compared["doubtful"]))
    if result["regret"]["groups"]:
        console.print(_regrets(result["regret"]))
    for device, fit in result["fits"].items():
        unknown = ", ".join(fit["unidentified"]) or "none"
        _line(console, f"{device}: fitted to {len(fit['rows'])} rows; coefficients these do not show: {unknown}")
    if result["fitted_rows"]:
        _line(console, f"fitted rows, by line: {ranges(result['fitted_rows'], _FITTED)}")
    for column, count in result["assumed"].items():
        _line(console, f"assumed, by the practice of the source: {column}, for {count} figures")
    for reason, found in list(result["left_out"].items())[:_REASONS]:
        _line(console, f"left out: {reason}: {found['rows']} rows, lines {ranges(found['lines'], 6)}")


def ranges(lines: list[int], most: int) -> str:
    """Return numbers as ranges, the first few of them."""
    spans: list[list[int]] = []
    for line in lines:
        if spans and line == spans[-1][1] + 1:
            spans[-1][1] = line
        else:
            spans.append([line, line])
    shown = [f"{first}-{last}" if last > first else f"{first}" for first, last in spans]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def percent(share: float | None) -> str:
    """Return a share as text; nothing where there is none."""
    return "" if share is None else f"{share * 100:.1f}"


def _errors(title: str, by_source: Mapping[str, Any], everything: Mapping[str, Any] | None) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("source, machine", "rows", "MAPE, %", "median, %", "worst, %", "bias, %", "worst line"):
        table.add_column(name, justify="left" if name.startswith("source") else "right", no_wrap=True)
    rows = list(by_source.items())
    if everything is not None and everything["rows"]:
        rows.append(("all", everything))
    for name, found in rows:
        shares = [percent(found[key]) for key in ("mape", "median", "worst", "bias")]
        table.add_row(name, str(found["rows"]), *shares, str(found["worst_line"]))
    return table


def _regrets(regret: Mapping[str, Any]) -> Table:
    groups = sorted(regret["groups"].items(), key=lambda each: -each[1]["regret"])
    title = f"Regret of the layout predicted to be fastest: {len(groups)} groups, the worst {min(len(groups), _GROUPS)}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("model, machine", "layouts", "regret, %", "picked line", "fastest line"):
        table.add_column(name, justify="left" if name.startswith("model") else "right")
    for name, found in groups[:_GROUPS]:
        picked, fastest = str(found["picked"]), str(found["fastest"])
        table.add_row(name, str(found["rows"]), percent(found["regret"]), picked, fastest)
    table.add_row("mean of all groups", "", percent(regret["mean"]), "", "")
    return table


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)
