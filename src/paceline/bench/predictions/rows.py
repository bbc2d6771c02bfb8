"""Files of published runs, read as they are: text by column, with the line that each row came from."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import DataError, nearest

COLUMNS = (
    "source",
    "system",
    "model",
    "params_b",
    "n_layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "seq_len",
    "vocab",
    "gpus",
    "gpu_type",
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "vpp",
    "micro_batch",
    "global_batch",
    "precision",
    "recompute",
    "metric",
    "value",
    "unit",
    "notes",
)
_NEEDED = ("metric", "value")
_NOTHING = ("none", "n/a", "na", "-", "null")
"""Words for nothing, in columns of numbers."""
_WORDS = ("source", "system", "model", "gpu_type", "precision", "recompute", "metric", "unit", "notes")
_ALONE = ("cp", "ep", "vpp")
"""Columns in which 0 says that nothing is split."""


class Unusable(Exception):
    """A row that cannot be predicted; the message is the reason by which such rows are counted."""


@dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        line: of the file, counted from 1 with the header.
        values: text by column; a column that is empty, or not there, is not among them.
        extra: more cells than there are columns, so that values may stand under the wrong names.
    """

    line: int
    values: Mapping[str, str]
    extra: bool = False

    def text(self, column: str) -> str:
        """Return what is written, or nothing."""
        return self.values.get(column, "")

    def number(self, column: str) -> float | None:
        """Return the number that is written, None where there is none.

        Raises:
            Unusable: it is no number, or not above zero.
        """
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            raise Unusable(f"{column} is no number") from None
        if not 0 < value < float("inf"):
            raise Unusable(f"{column} is not above zero")
        return value

    def whole(self, column: str) -> int | None:
        """Return the whole number that is written, None where there is none.

        Raises:
            Unusable: it is none, or not above zero.
        """
        value = self.number(column)
        if value is None:
            return None
        if value != int(value):
            raise Unusable(f"{column} is no whole number")
        return int(value)


@dataclass(frozen=True)
class Table:
    """A file's rows, and the columns that are not known and therefore not read."""

    rows: tuple[Row, ...]
    unknown: tuple[str, ...]


def read_rows(file: Path) -> Table:
    """Read a file of comma-separated values with a header; columns may be in any order, and most may be missing.

    Raises:
        DataError: it cannot be read, is empty, has a column twice, or has none for what was measured.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines)
            header = [name.strip().lower() for name in next(reader, [])]
            _check(header, file)
            rows = []
            last = reader.line_num
            for cells in reader:
                line, last = last + 1, reader.line_num
                if any(cell.strip() for cell in cells):
                    rows.append(_row(line, header, cells))
    except OSError as error:
        raise DataError(f"--data {file} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"--data {file} is no text in UTF-8: {error}. Save it as UTF-8.") from error
    except csv.Error as error:
        raise DataError(f"--data {file} is no table of comma-separated values: {error}.") from error
    if not rows:
        raise DataError(f"--data {file} has a header and no rows: there is nothing to predict.")
    return Table(tuple(rows), tuple(name for name in header if name and name not in COLUMNS))


def _check(header: list[str], file: Path) -> None:
    if not any(header):
        raise DataError(f"--data {file} is empty. Its first line names columns: {', '.join(COLUMNS)}.")
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise DataError(f"--data {file} has {', '.join(twice)} twice in its first line; name each column once.")
    for name in _NEEDED:
        if name not in header:
            raise DataError(
                f"--data {file} has no column '{name}' in its first line, so nothing was measured in it. "
                f"Columns that are read: {', '.join(COLUMNS)}.{nearest(name, header)}"
            )


def _row(line: int, header: list[str], cells: list[str]) -> Row:
    values = {name: cell.strip() for name, cell in zip(header, cells, strict=False) if name in COLUMNS}
    extra = any(cell.strip() for cell in cells[len(header) :])
    return Row(line, {name: value for name, value in values.items() if not _is_empty(name, value)}, extra)


def _is_empty(name: str, value: str) -> bool:
    if name in _WORDS:
        return not value
    return not value or value.lower() in _NOTHING or (name in _ALONE and value == "0")
