"""Criteo's format of click logs: 40 columns between tabs, many of them empty.

A line is a label (1: clicked), 13 whole numbers and 26 categories, which are any text, mostly of 8 hexadecimal digits.
A category becomes the key of (column, text) in 64 bits; a missing one has a key of its own, so that a model may learn
what its absence means, and every sample has as many keys as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.train.data.config import CriteoData
from paceline.train.data.keys import Keys, hashed, in_buckets
from paceline.train.data.lines import Lines
from paceline.train.data.numerals import NotANumber, Places, read_integers
from paceline.train.data.records import LineFault, LineSource, open_lines
from paceline.train.data.source import Batch, Source

INTEGERS: Final = 13
CATEGORIES: Final = 26
_COLUMNS: Final = 1 + INTEGERS + CATEGORIES


def open_criteo(config: CriteoData, base_dir: Path) -> tuple[Source, Source | None]:
    """Return click logs as batches of keys [n, 26] int64, numbers [n, 13] and labels [n]; or of keys [n, 39] alone."""

    def sources(found: Sequence[Lines]) -> list[Source]:
        parse = partial(parse_criteo, config=config)
        return [LineSource(lines, parse, f"the click logs {', '.join(config.files)}") for lines in found]

    return open_lines(config.files, config.validation_files, config.validation, base_dir, sources)


def parse_criteo(lines: Sequence[bytes], config: CriteoData) -> Batch:
    """Return a batch of lines.

    Raises:
        LineFault: a line is not of this format.
    """
    text = b"\n".join([*lines, b""])
    starts, ends = _columns(text, lines)
    labels = _labels(text, starts[:, 0], ends[:, 0])
    numbers, missing = _numbers(text, starts[:, 1 : 1 + INTEGERS], ends[:, 1 : 1 + INTEGERS])
    fields = np.broadcast_to(np.arange(CATEGORIES) + INTEGERS, (len(lines), CATEGORIES)).ravel()
    keys = hashed(text, starts[:, 1 + INTEGERS :].ravel(), ends[:, 1 + INTEGERS :].ravel(), fields)
    keys = keys.reshape(len(lines), CATEGORIES)
    keys_name, numbers_name, labels_name = config.keys
    batch: dict[str, NDArray[np.generic]] = {}
    if config.integers == "keys":
        keys = np.concatenate([_classes(numbers, missing), keys], axis=1)
    else:
        batch[numbers_name] = np.where(missing, 0, np.log1p(np.maximum(numbers, 0))).astype(np.float32)
    batch[keys_name] = keys if config.buckets is None else in_buckets(keys, config.buckets)
    batch[labels_name] = labels.astype(np.float32)
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def _columns(text: bytes, lines: Sequence[bytes]) -> tuple[Places, Places]:
    """Return where the columns of each line begin and end: [n, 40] each."""
    letters = np.frombuffer(text, dtype=np.uint8)
    marks = np.flatnonzero((letters == ord("\t")) | (letters == ord("\n")))
    if len(marks) != _COLUMNS * len(lines) or (letters[marks[_COLUMNS - 1 :: _COLUMNS]] != ord("\n")).any():
        counts = [line.count(b"\t") + 1 for line in lines]
        line = next(index for index, count in enumerate(counts) if count != _COLUMNS)
        hint = " With 39 there is no label, as in Criteo's own test set: nothing can be learnt or measured."
        raise LineFault(
            line,
            f"it has {counts[line]} columns between tabs, not {_COLUMNS}: a label, {INTEGERS} whole numbers, "
            f"{CATEGORIES} categories.{hint if counts[line] == _COLUMNS - 1 else ''}",
        )
    ends = marks.reshape(len(lines), _COLUMNS)
    starts = np.concatenate([[0], marks[:-1] + 1]).reshape(len(lines), _COLUMNS)
    return starts, ends


def _labels(text: bytes, starts: Places, ends: Places) -> NDArray[np.int64]:
    letters = np.frombuffer(text, dtype=np.uint8)[starts]
    wrong = (ends - starts != 1) | ((letters != ord("0")) & (letters != ord("1")))
    if wrong.any():
        line = int(np.flatnonzero(wrong)[0])
        word = text[starts[line] : ends[line]].decode(errors="replace")
        raise LineFault(line, f"the label is '{word}'; it is 1 (clicked) or 0.")
    return letters.astype(np.int64) - ord("0")


def _numbers(text: bytes, starts: Places, ends: Places) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the whole numbers, 0 where missing, and which are: [n, 13] each."""
    missing = starts == ends
    numbers = np.zeros(starts.shape, dtype=np.int64)
    try:
        numbers[~missing] = read_integers(text, starts[~missing], ends[~missing])
    except NotANumber as fault:
        line, column = np.argwhere(~missing)[fault.which]
        word = text[starts[line, column] : ends[line, column]].decode(errors="replace")
        raise LineFault(int(line), f"column {column + 2} is '{word}', not a whole number or nothing.") from None
    return numbers, missing


def _classes(numbers: NDArray[np.int64], missing: NDArray[np.bool_]) -> Keys:
    """Return keys for whole numbers: [n, 13].

    Small ones are classes of their own, and of larger ones those with one floor(log(x)^2), as in the solution that won
    Criteo's contest of 2014 (Juan, Zhuang, Chin: "3 idiots").
    """
    squares = np.floor(np.square(np.log(np.maximum(numbers, 3)))).astype(np.int64)
    classes = np.where(numbers > 2, squares + 3, np.maximum(numbers, -1000))
    classes = np.where(missing, -1001, classes)
    fields = np.broadcast_to(np.arange(INTEGERS), numbers.shape)
    words = np.ascontiguousarray(classes).tobytes()
    starts = np.arange(classes.size, dtype=np.int64) * 8
    return hashed(words, starts, starts + 8, fields.ravel()).reshape(numbers.shape)
