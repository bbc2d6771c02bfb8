"""Rows a second and core in the table of a server: read and updated at random places, far beyond the cache.

Settings: `table_rows` (sizes of the table), `table_widths`, `table_rules`, `table_batch` (rows of a call),
`table_rounds`. Beside each: rows copied by PyTorch out of and into a plain tensor at places that it is told, which is
what memory allows where nothing must be found or computed; and the same table in numpy, for the first size.
Seconds are those of the thread's processor time: on a busy machine a core is not all ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from paceline.bench import options as given
from paceline.bench.machine import one_thread
from paceline.bench.statistics import spread
from paceline.bench.table import quartiles
from paceline.exchange.job import Initializer, Rule
from paceline.exchange.table.build import BuildError
from paceline.exchange.table.choice import Choice
from paceline.exchange.table.implementation import Implementation
from paceline.exchange.table.rules import RULES
from paceline.exchange.table.sparse import Sparse

Times = dict[str, list[float]]
"""Seconds of each round, by what was done."""

_NATIVE, _NUMPY, _PLAIN = "table", "table in numpy", "plain tensor"


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    table_rows: tuple[int, ...] = (10**6, 10**7)
    table_widths: tuple[int, ...] = (8, 16)
    table_rules: tuple[str, ...] = ("adagrad",)
    table_batch: int = 100_000
    table_rounds: int = 20


READERS: Final[dict[str, given.Reader]] = {
    "table_rows": partial(given.whole_numbers, least=1000),
    "table_widths": partial(given.whole_numbers, least=1),
    "table_rules": partial(given.texts, known=list(RULES)),
    "table_batch": partial(given.whole_number, least=1),
    "table_rounds": partial(given.whole_number, least=2),
}
KEYS: Final = tuple(READERS)


def run(options: dict[str, str]) -> dict[str, Any]:
    """Measure; return `rows`, of each table its rates and their spread, and `settings`."""
    settings = given.settings_with(Settings(), options, READERS)
    with one_thread():
        tables = list(_tables(settings))
    return {"rows": tables, "settings": {"batch": settings.table_batch, "rounds": settings.table_rounds}}


def _tables(settings: Settings) -> Iterator[dict[str, Any]]:
    cases = [
        (rows, width, rule)
        for rows in settings.table_rows
        for width in settings.table_widths
        for rule in settings.table_rules
    ]
    with Progress(console=Console(stderr=True)) as progress:
        for rows, width, rule in progress.track(cases, description="rows of tables"):
            keys = _keys(rows)
            batches = _batches(rows, settings)
            for name, implementation in _implementations(portable=rows == settings.table_rows[0]):
                table, made_s = _made(implementation, keys, width, rule)
                times = _timed(table, keys, batches, width)
                about = {"of": name, "rows": rows, "width": width, "rule": rule, "make_rows_s": rows / made_s}
                about["bytes_a_row"] = table.memory_bytes / rows
                yield about | _rates(times, len(batches[0]))
                del table
            times = _timed_plain(rows, batches, width)
            yield {"of": _PLAIN, "rows": rows, "width": width, "rule": rule} | _rates(times, len(batches[0]))


def _implementations(*, portable: bool) -> Iterator[tuple[str, Implementation]]:
    """Yield native code where there is a compiler, and numpy where there is none, or it is asked for."""
    try:
        yield _NATIVE, Choice.NATIVE.make()
    except BuildError:
        portable = True
    if portable:
        yield _NUMPY, Choice.PORTABLE.make()


def _keys(rows: int) -> Tensor:
    """Return keys that are spread over all of 64 bits."""
    return torch.from_numpy((np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))


def _batches(rows: int, settings: Settings) -> list[NDArray[np.int64]]:
    """Return for each round places of rows, each once in it."""
    generator = np.random.default_rng(0)
    size = min(settings.table_batch, rows)
    return [generator.choice(rows, size, replace=False, shuffle=True) for _ in range(settings.table_rounds)]


def _made(implementation: Implementation, keys: Tensor, width: int, rule: str) -> tuple[Sparse, float]:
    """Return a table that has these rows, and the seconds that making them took."""
    table = Sparse(width, torch.float32, Rule(rule), Initializer("uniform", 0.01), 0, implementation)
    gradients = torch.ones(1 << 16, width)
    began = time.thread_time()
    for start in range(0, len(keys), len(gradients)):
        part = keys[start : start + len(gradients)]
        table.update(part, gradients[: len(part)])
    return table, time.thread_time() - began


def _timed(table: Sparse, keys: Tensor, batches: Sequence[NDArray[np.int64]], width: int) -> Times:
    def turn(places: Tensor, out: Tensor, gradients: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
        wanted = keys[places]
        yield "read", lambda: table.read(wanted, out)
        yield "update", lambda: table.update(wanted, gradients)

    return _turns(turn, batches, width)


def _timed_plain(rows: int, batches: Sequence[NDArray[np.int64]], width: int) -> Times:
    values = torch.zeros(rows, width)

    def turn(places: Tensor, out: Tensor, gradients: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
        yield "read", lambda: torch.index_select(values, 0, places, out=out)
        yield "update", lambda: values.index_add_(0, places, gradients)

    return _turns(turn, batches, width)


def _turns(
    turn: Callable[[Tensor, Tensor, Tensor], Iterator[tuple[str, Callable[[], object]]]],
    batches: Sequence[NDArray[np.int64]],
    width: int,
) -> Times:
    times: Times = {"read": [], "update": []}
    size = len(batches[0])
    out, gradients = torch.empty(size, width), torch.randn(size, width)
    for places in batches:
        for what, call in turn(torch.from_numpy(places), out, gradients):
            start = time.thread_time()
            call()
            times[what].append(time.thread_time() - start)
    return times


def _rates(times: Times, batch: int) -> dict[str, Any]:
    """Return rows a second of a core: the median, and quartiles in `spread`."""
    found = {f"{what}_rows_s": spread([batch / one for one in seconds]) for what, seconds in times.items()}
    medians: dict[str, Any] = {key: rate.median for key, rate in found.items()}
    return medians | {"spread": {key: rate.to_json() for key, rate in found.items()}}


def show(console: Console, result: dict[str, Any]) -> None:
    """Print what `run` returned."""
    settings = result["settings"]
    console.print(
        f"Rows at random places, {settings['batch']:,} a call; {settings['rounds']} rounds; millions a second of one "
        "core's time. Medians, quartiles in brackets.",
        highlight=False,
    )
    table = Table(title="rows of tables", title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("rows", "width", "rule", ""):
        table.add_column(head, justify="left" if head in ("rule", "") else "right", no_wrap=True)
    for head in ("read, M/s", "update, M/s", "bytes\na row"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in result["rows"]:
        rates = [quartiles(one["spread"][f"{what}_rows_s"], 1e-6, 1) for what in ("read", "update")]
        size = f"{one['bytes_a_row']:.0f}" if "bytes_a_row" in one else ""
        table.add_row(f"{one['rows']:,}", str(one["width"]), one["rule"], one["of"], *rates, size)
    console.print(table)
