"""Text as windows of tokens: Python's own standard library, and files of the user's."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from paceline.errors import DataError
from paceline.train.data.codec import ByteCodec, Codec, Tokens, open_codec, pack
from paceline.train.data.config import StdlibData, TextData, WindowKeys
from paceline.train.data.files import find_files, read_bytes
from paceline.train.data.order import Indices, hold_out_files
from paceline.train.data.source import Batch, Source

# Folders below the standard library that are not it, or that are written while Python runs.
_FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TESTS = frozenset({"test", "tests", "idle_test"})


class WindowSource(Source):
    """Windows of a row of tokens, side by side: sample i begins at token i * `sequence`.

    Args:
        tokens: [n], any unsigned type.
        window: names of inputs and labels, and whether labels are one token ahead.
        codec: what made the tokens.
        name: what messages call the text.

    Raises:
        DataError: there are fewer tokens than one sample needs.
    """

    def __init__(self, tokens: Tokens, window: WindowKeys, codec: Codec, name: str) -> None:
        self.name = name
        self.codec = codec
        self._tokens = tokens
        self._sequence = window.sequence
        self._ahead = int(window.labels_are_ahead)
        self._inputs, self._labels = window.keys
        self._span = np.arange(window.sequence + self._ahead, dtype=np.int64)
        needed = window.sequence + self._ahead
        if len(tokens) < needed:
            what = "is empty" if len(tokens) == 0 else f"holds {len(tokens)} tokens"
            raise DataError(
                f"{name} {what}; one sample needs {needed}: a sequence of {window.sequence}"
                f"{', and the label of its last token' if self._ahead else ''}. Use more text, a shorter 'sequence', "
                "or, for validation data, another fraction in 'validation' (0 for none)."
            )

    def __len__(self) -> int:
        return (len(self._tokens) - self._ahead) // self._sequence

    def batch(self, indices: Indices) -> Batch:
        """See `Source.batch`; inputs and labels: [n, sequence], int64."""
        windows = torch.from_numpy(self._tokens[indices[:, None] * self._sequence + self._span].astype(np.int64))
        # Slices are copied: kernels that are given local pieces may rely on contiguous memory.
        inputs = windows[:, : self._sequence].contiguous()
        labels = windows[:, 1:].contiguous() if self._ahead else windows.clone()
        return {self._inputs: inputs, self._labels: labels}


def open_stdlib(config: StdlibData) -> tuple[Source, Source | None]:
    """Return the text of the running Python's standard library; one file in every 1 / `validation` validates."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in _python_files(root, config.tests) if path.stat().st_size]
    if not files:
        raise DataError(f"there is no Python source below {root}; this Python was installed without it.")
    held_out = hold_out_files(len(files), config.validation)
    codec, name = ByteCodec(), "the standard library"
    train = pack((read_bytes(path) for path, held in zip(files, held_out, strict=True) if not held), codec)
    source = WindowSource(train, config, codec, name)
    if not held_out.any():
        return source, None
    rest = pack((read_bytes(path) for path, held in zip(files, held_out, strict=True) if held), codec)
    return source, WindowSource(rest, config, codec, f"{name} (validation)")


def open_text(config: TextData, base_dir: Path) -> tuple[Source, Source | None]:
    """Return the text of files; to validate on, that of `validation_files`, or else the last part of the text."""
    codec = open_codec(config.tokenizer, config.separator, base_dir)
    tokens = _tokens_of(config.files, codec, base_dir)
    name = _name(config.files)
    if config.validation_files:
        rest = _tokens_of(config.validation_files, codec, base_dir)
        validation = WindowSource(rest, config, codec, _name(config.validation_files))
        return WindowSource(tokens, config, codec, name), validation
    return split_text(tokens, config, config.validation, codec, name)


def split_text(
    tokens: Tokens, window: WindowKeys, fraction: float, codec: Codec, name: str
) -> tuple[WindowSource, WindowSource | None]:
    """Return windows of the text but its last part, and of its last part: `fraction` of the tokens."""
    if fraction == 0 or len(tokens) == 0:
        return WindowSource(tokens, window, codec, name), None
    border = len(tokens) - round(len(tokens) * fraction)
    train = WindowSource(tokens[:border], window, codec, name)
    return train, WindowSource(tokens[border:], window, codec, f"{name} (validation)")


def _python_files(folder: Path, tests: bool) -> Iterator[Path]:
    """Yield .py files below `folder`, sorted by path, so that every rank and every start sees one order."""
    skipped = _FOREIGN if tests else _FOREIGN | _TESTS
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - skipped)
        # A link may lead out of the library or nowhere: distributions link their own configuration.
        yield from (
            path for file in sorted(files) if file.endswith(".py") and not (path := Path(where, file)).is_symlink()
        )


def _tokens_of(patterns: tuple[str, ...], codec: Codec, base_dir: Path) -> Tokens:
    pieces = []
    for path in find_files(patterns, base_dir):
        try:
            pieces.append(pack([read_bytes(path)], codec))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 text, which a tokenizer needs: byte {error.start} is "
                f"0x{error.object[error.start]:02x}. Convert it, or leave out 'tokenizer' to train on bytes."
            ) from error
    return np.concatenate(pieces)


def _name(patterns: tuple[str, ...]) -> str:
    return f"the text of {', '.join(patterns)}"
