"""Push and pull by each transport, against the raw limits and peers: one run, everybody in turn.

Settings: `size` of a dense tensor (bytes), `rows` and `width` of a sparse access, `rounds`, `repetitions` of what is
short in a round, `ways` (commas between).
A push sends a tensor to another process and returns when that has it in its memory; a pull has it sent back. Rows: keys
of 64 bits one way, and values (float32) with them or in return. Nothing is applied: the table's work is another part.
ps-lite takes part where `PS_LITE` names a checkout of it (`transports_pslite`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench import options as given
from paceline.bench.server.transports_turns import take_turns
from paceline.bench.server.transports_ways import LIMITS, OURS, PEERS, WAYS, Load, Times
from paceline.bench.statistics import ratios, spread
from paceline.bench.table import quartiles


@dataclass(frozen=True)
class Settings:
    """What `--set` can change."""

    size: int = 64 * 10**6
    rows: int = 1000
    width: int = 16
    rounds: int = 10
    repetitions: int = 200
    ways: tuple[str, ...] = tuple(WAYS)

    @classmethod
    def read(cls, options: dict[str, str]) -> Settings:
        """Read `key=value` pairs.

        Raises:
            RecipeError: a key or a value is unknown.
        """
        return given.settings_with(cls(), options, READERS)


READERS: Final[dict[str, given.Reader]] = {
    "size": lambda key, text: given.byte_counts(key, text)[0] // 64 * 64,
    "rows": partial(given.whole_number, least=1),
    "width": partial(given.whole_number, least=1),
    "rounds": partial(given.whole_number, least=1),
    "repetitions": partial(given.whole_number, least=1),
    "ways": partial(given.texts, known=list(WAYS)),
}
KEYS: Final = tuple(READERS)


def run(options: dict[str, str]) -> dict[str, Any]:
    """Measure; return `transports`, `peers`, `left_out` and `settings`."""
    settings = Settings.read(options)
    load = Load(settings.size, settings.rows, settings.width)
    names = list(settings.ways)
    names += [limit for name in settings.ways if (limit := LIMITS.get(name)) and limit not in names]
    taken, left_out = take_turns(names, load, settings.rounds, settings.repetitions)
    figures = {name: _figures(times, load) for name, times in taken.items()}
    for name, limit in LIMITS.items():
        if name in figures and limit in taken:
            figures[name] |= _against(taken[name], taken[limit], load)
    return {
        "transports": {name: figures[name] for name in (*OURS, *LIMITS.values()) if name in figures},
        "peers": {name: figures[name] for name in PEERS if name in figures},
        "left_out": left_out,
        "settings": asdict(settings),
    }


def _figures(times: Times, load: Load) -> dict[str, Any]:
    """Return rates and times: medians of the rounds, and quartiles in `spread`. times: seconds, by what was done."""
    found: dict[str, Any] = {"spread": {}}
    for what, seconds in times.items():
        key, value = _units(what, load)
        of_rounds = spread([value(one) for one in seconds])
        found[key] = of_rounds.median
        found["spread"][key] = of_rounds.to_json()
    return found


def _units(what: str, load: Load) -> tuple[str, Any]:
    if what == "rtt":
        return "rtt_us", lambda seconds: seconds * 1e6
    if what.endswith("rows"):
        return f"{what}_s", lambda seconds: load.rows / seconds
    return f"{what}_mb_s", lambda seconds: load.size / seconds / 1e6


def _against(ours: Times, limit: Times, load: Load) -> dict[str, Any]:
    """Return the limit's own rates, and ours as fractions of it, round by round."""
    raw = spread([load.size / seconds / 1e6 for what in ("push", "pull") for seconds in limit[what]])
    of_limit = {what: ratios(limit[what], ours[what]).to_json() for what in ours if what in limit}
    if "pull_placed" in ours:
        of_limit["pull_placed"] = ratios(limit["pull"], ours["pull_placed"]).to_json()
    return {"raw_mb_s": raw.median, "of_raw": of_limit}


def show(console: Console, result: dict[str, Any]) -> None:
    """Print what `run` returned."""
    settings = result["settings"]
    console.print(
        f"{settings['size'] / 1e6:g} MB, and {settings['rows']} rows of {settings['width']}; {settings['rounds']} "
        "rounds. Medians, quartiles in brackets. Of raw: our speed by the limit's in the same round.",
        highlight=False,
    )
    for title, columns in _TABLES.items():
        console.print(_table(title, columns, result["transports"] | result["peers"]))
    for name, why in result["left_out"].items():
        console.print(f"left out: {name}: {why}", highlight=False, markup=False)


_TABLES: Final[dict[str, dict[str, tuple[str, float, int]]]] = {
    "a dense tensor": {
        "push, MB/s": ("push_mb_s", 1, 0),
        "pull, MB/s": ("pull_mb_s", 1, 0),
        "pull into place": ("pull_placed_mb_s", 1, 0),
        "push of raw": ("push", 1, 2),
        "pull of raw": ("pull", 1, 2),
    },
    "rows": {
        "push, M rows/s": ("push_rows_s", 1e-6, 2),
        "pull, M rows/s": ("pull_rows_s", 1e-6, 2),
        "there and back, µs": ("rtt_us", 1, 1),
        "push of raw": ("push_rows", 1, 2),
        "pull of raw": ("pull_rows", 1, 2),
    },
}
"""Heads, and what stands under them: a key, its unit and digits."""


def _table(title: str, columns: dict[str, tuple[str, float, int]], figures: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("", *columns):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for name, found in figures.items():
        known = found.get("spread", {}) | found.get("of_raw", {})
        cells = [quartiles(known[key], unit, digits) if key in known else "" for key, unit, digits in columns.values()]
        if any(cells):
            table.add_row(name, *cells)
    return table
