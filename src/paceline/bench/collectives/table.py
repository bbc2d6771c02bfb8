"""How measured collectives are shown: a table for each, on each number of ranks."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench.collectives.jobs import Way
from paceline.bench.machine import warn_of_load

_HEADS = {Way.SHM: "shm, µs", Way.SHM_IN_PLACE: "in place, µs", Way.GLOO: "gloo, µs", Way.BOUND: "bound, µs"}
_RATIOS = {
    "gloo_over_shm": "gloo /\nshm",
    "gloo_over_in_place": "gloo /\nin place",
    "in_place_over_bound": "in place\n/ bound",
}


def print_tables(console: Console, result: dict[str, Any]) -> None:
    """Print what `collectives.main` returns."""
    machine = result["machine"]
    console.print(
        f"One thread a rank; {machine['cores']} cores of {machine['processor']}; torch {machine['torch']}; "
        f"shm is {machine['shm']}; {result['settings']['rounds']} rounds. Medians, quartiles in brackets.",
        highlight=False,
    )
    warn_of_load(console, machine)
    cluster = result["settings"].get("cluster")
    if cluster is not None:
        console.print(f"Expected: what the cluster '{cluster}' says of as many neighbouring ranks.", highlight=False)
    for ranks, kinds in result["collectives"].items():
        crowded = "" if int(ranks) <= machine["cores"] else f", more ranks than cores ({machine['cores']})"
        for kind, sizes in kinds.items():
            console.print(_table(f"{kind}, {ranks} ranks{crowded}", sizes))


def _table(title: str, sizes: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    expected = ["expected,\nMB/s"] if any("expected" in found for found in sizes.values()) else []
    for head in ("bytes", *_HEADS.values(), "shm,\nMB/s", "in place,\nMB/s", *expected, *_RATIOS.values()):
        table.add_column(head, justify="right")
    for size, found in sizes.items():
        rates = found["gb_s"]
        table.add_row(
            _bytes(int(size)),
            *(_microseconds(found, f"{way}_us") if f"{way}_us" in found else "" for way in _HEADS),
            *(f"{rates[way] * 1e3:.0f}" if way in rates else "" for way in (Way.SHM, Way.SHM_IN_PLACE)),
            *([f"{found['expected']['gb_s'] * 1e3:.0f}"] if expected else []),
            *(f"{found[name]:.2f}" if name in found else "" for name in _RATIOS),
        )
    return table


def _bytes(count: int) -> str:
    """A size as `--set sizes=` reads it."""
    for unit, factor in (("M", 1 << 20), ("k", 1 << 10)):
        if count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)


def _microseconds(found: dict[str, Any], key: str) -> str:
    """Median, and the quartiles in brackets."""
    low, high = found["spread"][key]["low"], found["spread"][key]["high"]
    digits = 1 if found[key] < 100 else 0
    return f"{found[key]:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
