"""The format of LIBSVM and SVMlight: `label index:value index:value ...`, what is absent being zero.

Samples have different numbers of features, and a captured program has one shape. So every sample gets as many places as
the longest line has features, and those left over have the key 0 and the value 0; no feature has the key 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.train.data.config import LibsvmData
from paceline.train.data.keys import in_buckets
from paceline.train.data.lines import Lines
from paceline.train.data.numerals import NotANumber, Places, read_floats, read_integers
from paceline.train.data.records import LineFault, LineSource, open_lines
from paceline.train.data.source import Batch, Source


def open_libsvm(config: LibsvmData, base_dir: Path) -> tuple[Source, Source | None]:
    """Return libsvm files as batches of keys [n, features] int64, values [n, features] and labels [n]."""

    def sources(found: Sequence[Lines]) -> list[Source]:
        places = config.features or max(1, *(lines.most for lines in found))
        parse = partial(parse_libsvm, config=config, features=places)
        return [LineSource(lines, parse, f"the libsvm files {', '.join(config.files)}") for lines in found]

    return open_lines(config.files, config.validation_files, config.validation, base_dir, sources, mark=b":")


def parse_libsvm(lines: Sequence[bytes], config: LibsvmData, features: int) -> Batch:
    """Return a batch of lines, each with room for `features` features.

    Raises:
        LineFault: a line is not of this format, or does not fit.
    """
    text = b"\n".join(lines)
    if b"#" in text:
        text = b"\n".join(line.partition(b"#")[0] for line in lines)
    words = _Words(text, len(lines))
    labels = words.floats(words.starts[words.is_label], words.ends[words.is_label], "the label", "a number")
    if config.binary:
        labels = _binary(labels)
    starts, ends, colons = words.starts[~words.is_label], words.ends[~words.is_label], words.colons
    indices = words.integers(starts, colons, "the index", "a whole number")
    values = words.floats(colons + 1, ends, "the value", "a finite number")
    owners = words.line_of(starts)
    keys = _keys(indices, owners, config)
    counts = np.bincount(owners, minlength=len(lines))
    places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    if counts.max(initial=0) > features:
        if config.longer == "refuse":
            line = int(np.flatnonzero(counts > features)[0])
            raise LineFault(
                line,
                f"it has {counts[line]} features, and 'features' leaves room for {features}; raise it, or set "
                "'longer: cut' to drop the last ones of such lines.",
            )
        fits = places < features
        owners, places, keys, values = owners[fits], places[fits], keys[fits], values[fits]
    padded_keys = np.zeros((len(lines), features), dtype=np.int64)
    padded_values = np.zeros((len(lines), features), dtype=np.float32)
    padded_keys[owners, places] = keys
    padded_values[owners, places] = values
    arrays = (padded_keys, padded_values, labels.astype(np.float32))
    return dict(zip(config.keys, map(torch.from_numpy, arrays), strict=True))


class _Words:
    """The words of some lines: first a label, then pairs with one colon each.

    Attributes:
        starts, ends: [words], places in the text.
        is_label: [words], whether it is the first of its line.
        colons: places of the colons, one for each word that is no label.

    Raises:
        LineFault: they are something else.
    """

    def __init__(self, text: bytes, count: int) -> None:
        self._text = text
        letters = np.frombuffer(text, dtype=np.uint8)
        self._line_ends = np.flatnonzero(letters == ord("\n"))
        blank = np.concatenate([[True], letters <= ord(" "), [True]])
        self.starts = np.flatnonzero(~blank[1:-1] & blank[:-2])
        self.ends = np.flatnonzero(~blank[1:-1] & blank[2:]) + 1
        self.colons = np.flatnonzero(letters == ord(":"))
        lines = self.line_of(self.starts)
        words = np.bincount(lines, minlength=count)
        if count and words.min() == 0:
            raise LineFault(int(np.argmin(words)), "it has no label; write 'label index:value ...'.")
        self.is_label = np.diff(lines, prepend=-1) > 0
        self._check_pairs()

    def line_of(self, places: Places) -> Places:
        """Return the lines of places in the text."""
        return np.searchsorted(self._line_ends, places).astype(np.int64, copy=False)

    def _check_pairs(self) -> None:
        """Check that all words but labels have a colon, and one."""
        inside = np.bincount(np.searchsorted(self.starts, self.colons, side="right") - 1, minlength=len(self.starts))
        wrong = inside != ~self.is_label
        if wrong.any():
            which = int(np.flatnonzero(wrong)[0])
            place = "the label is" if self.is_label[which] else "a feature is"
            raise self._fault(self.starts[which : which + 1], self.ends[which : which + 1], 0, place, "index:value")

    def floats(self, starts: Places, ends: Places, what: str, wanted: str) -> NDArray[np.float64]:
        """Return the numbers between some places."""
        try:
            return read_floats(self._text, starts, ends)
        except NotANumber as fault:
            raise self._fault(starts, ends, fault.which, f"{what} is", wanted) from None

    def integers(self, starts: Places, ends: Places, what: str, wanted: str) -> NDArray[np.int64]:
        """Return the whole numbers between some places."""
        try:
            return read_integers(self._text, starts, ends)
        except NotANumber as fault:
            raise self._fault(starts, ends, fault.which, f"{what} is", wanted) from None

    def _fault(self, starts: Places, ends: Places, which: int, what: str, wanted: str) -> LineFault:
        word = self._text[starts[which] : ends[which]].decode(errors="replace")
        line = int(self.line_of(starts[which : which + 1])[0])
        return LineFault(line, f"{what} '{word}', not {wanted}. A line is 'label index:value index:value ...'.")


def _binary(labels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return labels of 0 and 1; -1 is 0."""
    known = np.isin(labels, (-1, 0, 1))
    if not known.all():
        line = int(np.flatnonzero(~known)[0])
        raise LineFault(
            line,
            f"the label is {labels[line]:g}; labels of two classes are 0 and 1, or -1 and 1. For others set "
            "'binary: false'.",
        )
    return np.maximum(labels, 0)


def _keys(indices: NDArray[np.int64], owners: Places, config: LibsvmData) -> NDArray[np.int64]:
    """Return the keys of indices; none is 0."""
    least = 0 if config.zero_based else 1
    if indices.min(initial=least) < least:
        which = int(np.flatnonzero(indices < least)[0])
        raise LineFault(
            int(owners[which]),
            f"the index is {indices[which]}; indices count from {least}"
            + ("." if config.zero_based else ". Where they count from 0, set 'zero_based: true'."),
        )
    keys = indices + 1 if config.zero_based else indices
    return keys if config.buckets is None else in_buckets(keys, config.buckets)
