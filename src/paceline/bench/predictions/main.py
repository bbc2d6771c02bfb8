"""`paceline bench predictions`: step times and memory of published training runs, predicted beside measured.

    paceline bench predictions --data measured_runs.csv --json predictions.json

Every row with a full configuration of a dense Transformer is predicted; all others are counted by reason. Rows that
profiles were fitted to are shown apart and count in no figure. `--fit-rows` fits the profiles anew to the rows that it
names (`none`: to no row, so that rates are as they are before any fit).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench import options as given
from paceline.bench.machine import table_console
from paceline.bench.predictions.fitted import Profiles, chosen_lines, profiles
from paceline.bench.predictions.judging import Judged, by_source, errors, judged, regrets
from paceline.bench.predictions.likely import with_likely_micro_batches
from paceline.bench.predictions.page import lines_of_page
from paceline.bench.predictions.predicted import predictions
from paceline.bench.predictions.profiles import write_profiles
from paceline.bench.predictions.rows import Table, read_rows
from paceline.bench.predictions.samples import Samples, samples_of
from paceline.bench.predictions.table import print_tables
from paceline.bench.sections import write_section
from paceline.cluster.files import load
from paceline.errors import RecipeError

SECTION = "published runs"
"""The part of a page that `markdown` writes."""


@dataclass(frozen=True)
class Settings:
    """What can be asked for.

    Attributes:
        data: the file of published runs.
        fit_rows: to which profiles are fitted anew; None: the shipped ones are used.
        markdown: a page whose section of this benchmark is written anew.
        profiles: a folder of devices' files into which fitted rates are written, with a list of the fitted rows.
        rows: each prediction is told in the result.
    """

    data: Path
    fit_rows: str | None = None
    markdown: Path | None = None
    profiles: Path | None = None
    rows: bool = False

    @classmethod
    def read(cls, options: dict[str, str]) -> Settings:
        """Read `key=value` pairs.

        Raises:
            RecipeError: a key or a value is unknown, or no file is named.
        """
        readers: dict[str, given.Reader] = {
            "data": given.path,
            "fit_rows": given.text,
            "markdown": given.path,
            "profiles": given.path,
            "rows": given.yes_or_no,
        }
        options = {key.replace("-", "_"): text for key, text in options.items()}
        settings = given.settings_with(cls(data=Path()), options, readers)
        if "data" not in options:
            raise RecipeError("which published runs? Name a file of them: paceline bench predictions --data FILE.csv.")
        return settings


def main(options: dict[str, str]) -> dict[str, Any]:
    """Predict published runs, print how far off that is, and return it.

    Raises:
        PacelineError: a setting or the file cannot be used.
    """
    settings = Settings.read(options)
    table = read_rows(settings.data)
    samples = samples_of(table.rows)
    clusters = {name: load(name) for name in sorted({one.configuration.cluster for one in samples.usable})}
    used = profiles(samples.usable, clusters, chosen_lines(settings.fit_rows, samples.usable))
    likely = with_likely_micro_batches(samples.usable, used.clusters)
    found = judged(likely, predictions(likely, used.clusters), used.clusters, used.lines)
    result = result_of(table, samples, used, found)
    if settings.rows:
        result["rows"] = [_row(row) for row in found]
    print_tables(table_console(), result)
    if settings.profiles is not None:
        write_profiles(settings.profiles, used.fits, used.rows)
    if settings.markdown is not None:
        write_section(settings.markdown, SECTION, lines_of_page(result, settings.data.name))
    return result


def result_of(table: Table, samples: Samples, used: Profiles, found: list[Judged]) -> dict[str, Any]:
    """Return what `--json` writes; errors are shares: 0.04 is 4 %."""
    times = [row for row in found if not row.sample.is_memory]
    memory = [row for row in found if row.sample.is_memory]
    lists = regrets(row for row in times if row.counts)
    return {
        **_compared(times),
        "memory": _compared(memory),
        "regret": {
            "groups": {
                one.name: {"rows": one.rows, "regret": one.regret, "picked": one.picked, "fastest": one.fastest}
                for one in lists
            },
            "mean": sum(one.regret for one in lists) / len(lists) if lists else None,
            "worst": max((one.regret for one in lists), default=None),
        },
        "fitted_rows": sorted(used.lines),
        "fits": {
            device: {"rows": list(fit.names), "unidentified": list(fit.unidentified)}
            for device, fit in used.fits.items()
        },
        "left_out": {
            reason: {"rows": len(lines), "lines": lines}
            for reason, lines in sorted(samples.left_out.items(), key=lambda each: -len(each[1]))
        },
        "assumed": _assumed(found),
        "read": {
            "rows": len(table.rows),
            "predicted": sum(len(row.sample.lines) for row in found),
            "unknown_columns": list(table.unknown),
        },
    }


def _compared(rows: list[Judged]) -> dict[str, Any]:
    """Return errors of all rows that count, by source, and those of rows that do not."""

    def told(chosen: list[Judged]) -> dict[str, Any]:
        found = errors(chosen)
        return found.as_json() if found else {"rows": 0, "mape": None, "median": None, "worst": None}

    counting = [row for row in rows if row.counts]
    return {
        "all": told(counting),
        "by_source": {name: told(chosen) for name, chosen in by_source(counting).items()},
        "fitted": {name: told(chosen) for name, chosen in by_source(row for row in rows if row.fitted).items()},
        "doubtful": told([row for row in rows if row.sample.configuration.notes.doubtful and not row.fitted]),
    }


def _assumed(found: list[Judged]) -> dict[str, int]:
    """Return by column in how many predictions the practice of a source stands for it."""
    counts: dict[str, int] = {}
    for row in found:
        for column in row.sample.configuration.assumed:
            counts[column] = counts.get(column, 0) + 1
    return counts


def _row(row: Judged) -> dict[str, Any]:
    return {
        "line": row.sample.row.line,
        "lines": list(row.sample.lines),
        "identity": row.sample.identity,
        "source": row.sample.row.text("source"),
        "quantity": row.sample.reading.quantity.name.lower(),
        "predicted": row.predicted,
        "measured": row.measured,
        "error": row.error,
        "fitted": row.fitted,
    }
