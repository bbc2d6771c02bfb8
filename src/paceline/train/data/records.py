"""Sources whose samples are lines of text files of any size: read and parsed when they are asked for.

Lines that lie near each other are read near each other in time, because the order of an epoch keeps to blocks
(`order.Order`); so a file larger than memory is read once an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from paceline.errors import DataError
from paceline.train.data.files import find_files
from paceline.train.data.lines import Lines
from paceline.train.data.order import Indices, hold_out
from paceline.train.data.source import Batch, Source

_BLOCK: Final = 1024
"""Lines that are read together, about: 64 blocks are shuffled among each other, and pass through memory at a time."""

_PERIOD: Final = 1000
"""Of each so many lines, the same ones are held out."""


class LineFault(Exception):
    """A line cannot be read. line: its number among those that were to be parsed; message: what is wrong with it."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


Parse: TypeAlias = Callable[[Sequence[bytes]], Batch]
"""Makes a batch of lines; raises LineFault."""


class LineSource(Source):
    """Lines as samples."""

    block = _BLOCK

    def __init__(self, lines: Lines, parse: Parse, name: str) -> None:
        self.name = name
        self._lines = lines
        self._parse = parse

    def __len__(self) -> int:
        return len(self._lines)

    def batch(self, indices: Indices) -> Batch:
        """See `Source.batch`.

        Raises:
            DataError: a line cannot be read; the message names it.
        """
        try:
            return self._parse(self._lines.read(indices))
        except LineFault as fault:
            index = int(indices[fault.line])
            raise DataError(f"{self._lines.where(index)}: {fault.message}{self._lines.hint(index)}") from None


class Periodic(Source):
    """Of every `_PERIOD` samples of another source the same ones, in their order. `kept`: which, rising."""

    def __init__(self, source: Source, kept: Indices, name: str) -> None:
        self.name = name
        self.block = source.block
        self._source = source
        self._kept = kept
        whole, rest = divmod(len(source), _PERIOD)
        self._length = whole * len(kept) + int(np.searchsorted(kept, rest))

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Indices) -> Batch:
        """See `Source.batch`."""
        whole, rest = np.divmod(indices, len(self._kept))
        return self._source.batch(whole * _PERIOD + self._kept[rest])


def open_lines(
    files: Sequence[str],
    validation_files: Sequence[str],
    fraction: float,
    base_dir: Path,
    source_of: Callable[[Sequence[Lines]], Sequence[Source]],
    mark: bytes | None = None,
) -> tuple[Source, Source | None]:
    """Return what to train on and what to validate on: other files where there are any, else some lines of the same.

    Those are the same fixed random choice out of every 1,000 lines: neither memory nor a pass over the file is needed.

    Args:
        files: paths and globs.
        validation_files: more of them, to validate on; or none.
        fraction: of lines to validate on, where there are no files for it.
        base_dir: folder that relative paths are relative to.
        source_of: makes sources of lines, in the same way of all.
        mark: see `Lines`.

    Raises:
        DataError: a file cannot be used, or nothing would be left to train on.
    """
    named = [find_files(patterns, base_dir) for patterns in (files, validation_files) if patterns]
    source, *others = source_of([Lines(paths, mark) for paths in named])
    if others or fraction == 0:
        return source, (others[0] if others else None)
    train, validation = (
        Periodic(source, kept, name)
        for kept, name in zip(hold_out(_PERIOD, fraction), (source.name, f"{source.name} (validation)"), strict=True)
    )
    if len(train) == 0 or len(validation) == 0:
        raise DataError(
            f"{source.name} holds {len(source)} lines, too few to set {fraction} of them apart; name "
            "'validation_files', or set 'validation' to 0."
        )
    return train, validation
