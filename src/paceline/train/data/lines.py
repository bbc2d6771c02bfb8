"""Lines of text files by number, however large the files are: none is ever read as a whole.

One pass over a file finds where its lines begin: 8 bytes a line, in memory for small files, mapped from the cache
beside cached programs for large ones, so that it is done once for a file. Lines are then read where they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from paceline.errors import DataError
from paceline.runtime.program_cache import default_directory
from paceline.train.data.files import reading
from paceline.train.data.order import Indices

_CHUNK: Final = 4 << 20
"""Bytes that are searched for line ends at a time."""

_SMALL: Final = 64 << 20
"""Bytes of a file whose index is not worth a file of its own."""

_LONGEST: Final = 64 << 20
"""Bytes of a line; what is longer is no text."""

_BYTE_ORDER: Final = b"\xef\xbb\xbf"
"""With which some programs begin a text in UTF-8."""

_COMPRESSED: Final = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"BZ": ("bzip2", "bunzip2 -k"),
    b"\xfd7": ("xz", "unxz -k"),
    b"\x28\xb5": ("zstd", "unzstd"),
    b"PK": ("zip", "unzip"),
}
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class LineIndex:
    """Where the lines of a file are.

    Attributes:
        starts: [lines + 1] int64: where each line begins, and where the file ends. Blank lines do not count.
        most: how often the byte that was counted stands in the line that has most of it.
    """

    starts: NDArray[np.int64]
    most: int

    def __len__(self) -> int:
        return len(self.starts) - 1


class Lines:
    """The lines of some files, one after the other.

    Args:
        paths: the files.
        mark: a byte to count, such as what stands in every feature of a line; None to count nothing.

    Raises:
        DataError: a file is missing, compressed, or no text, or holds no lines.
    """

    def __init__(self, paths: Sequence[Path], mark: bytes | None = None) -> None:
        self._paths = list(paths)
        self._indices = [_index(path, mark) for path in paths]
        self._starts = np.cumsum([0, *map(len, self._indices)])
        self._files: dict[int, IO[bytes]] = {}
        self.most = max((index.most for index in self._indices), default=0)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Indices) -> list[bytes]:
        """Return the lines at `indices`, without their end marks. Lines in a row are read at once."""
        files = np.searchsorted(self._starts, indices, side="right") - 1
        found = [b""] * len(indices)
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            with reading(self._paths[file]):
                self._read_file(file, indices[places] - self._starts[file], places.tolist(), found)
        return found

    def where(self, index: int) -> str:
        """Return the file of a line and its number in it, for messages."""
        file, line = self._place(index)
        start = int(self._indices[file].starts[line])
        before = 0
        with reading(self._paths[file]), self._paths[file].open("rb") as text:
            while start > 0 and (piece := text.read(min(start, _CHUNK))):
                before += piece.count(b"\n")
                start -= len(piece)
        return f"{self._paths[file]}, line {before + 1}"

    def hint(self, index: int) -> str:
        """Return what may be wrong with a line that cannot be read, by where it stands; empty if nothing is known."""
        file, line = self._place(index)
        path = self._paths[file]
        if line == 0:
            return f" If this is a header, remove it: tail -n +2 {path} > NEW."
        if line == len(self._indices[file]) - 1:
            with reading(path), path.open("rb") as text:
                text.seek(-1, os.SEEK_END)
                if text.read(1) != b"\n":
                    return " The file ends in this line, without a line end; it may have been cut off."
        return ""

    def _place(self, index: int) -> tuple[int, int]:
        """Return the file of a line, and its number among the lines there that are not blank."""
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return file, index - int(self._starts[file])

    def _read_file(self, file: int, lines: Indices, places: list[int], found: list[bytes]) -> None:
        """Put lines of one file at their places in `found`."""
        starts = self._indices[file].starts
        begins, ends = starts[lines].tolist(), starts[lines + 1].tolist()
        handle = self._opened(file).fileno()
        first = 0
        while first < len(places):
            last = first
            while last + 1 < len(places) and begins[last + 1] == ends[last]:
                last += 1
            start, end = begins[first], ends[last]
            text = os.pread(handle, end - start, start)
            if len(text) < end - start:
                raise DataError(f"{self._paths[file]} has become shorter since it was opened; do not write to it.")
            for at in range(first, last + 1):
                found[places[at]] = text[begins[at] - start : ends[at] - start].rstrip(b"\r\n")
            first = last + 1

    def _opened(self, file: int) -> IO[bytes]:
        if file not in self._files:
            self._files[file] = self._paths[file].open("rb", buffering=0)
        return self._files[file]


def _index(path: Path, mark: bytes | None) -> LineIndex:
    """Return where the lines of a file are, from the cache where it is there."""
    with reading(path):
        state = path.stat()
        with path.open("rb") as file:
            begin = file.read(2)
        if begin in _COMPRESSED:
            kind, unpack = _COMPRESSED[begin]
            raise DataError(
                f"{path} is compressed ({kind}), and lines cannot be read from the middle of it; unpack it first: "
                f"{unpack} {path}"
            )
        if begin in _UTF16:
            raise DataError(f"{path} is text in UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {path} > NEW")
        if state.st_size < _SMALL:
            pieces = list(_pieces(path, mark))
            index = LineIndex(np.concatenate([starts for starts, _ in pieces]), max(marks for _, marks in pieces))
        else:
            index = _cached(path, mark, f"{path.resolve()}:{state.st_size}:{state.st_mtime_ns}:{mark!r}")
    if len(index) == 0:
        raise DataError(f"{path} is empty: it has no lines.")
    return index


def _cached(path: Path, mark: bytes | None, identity: str) -> LineIndex:
    """Return an index that lies in a file; whoever comes first makes it, and the others wait."""
    directory = default_directory()
    if directory is None:
        with tempfile.TemporaryFile() as file:
            return _mapped(file, _write(path, mark, file))
    directory = directory / "lines"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = directory / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    with _locked(name.with_suffix(".lock")):
        if not name.exists():
            draft = name.with_suffix(f".{os.getpid()}")
            with draft.open("w+b") as file:
                most = _write(path, mark, file)
                file.write(np.int64(most).tobytes())
            draft.replace(name)
    with name.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        most = int(np.frombuffer(file.read(8), dtype=np.int64)[0])
        return _mapped(file, most, trailing=8)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, mark: bytes | None, file: IO[bytes]) -> int:
    """Write where all lines begin; return how often the mark stands in a line at most."""
    most = 0
    for starts, marks in _pieces(path, mark):
        file.write(starts.tobytes())
        most = max(most, marks)
    file.flush()
    return most


def _mapped(file: IO[bytes], most: int, trailing: int = 0) -> LineIndex:
    count = (os.fstat(file.fileno()).st_size - trailing) // 8
    starts: NDArray[np.int64] = np.memmap(file, dtype=np.int64, mode="r", shape=(count,))
    return LineIndex(starts, most)


def _pieces(path: Path, mark: bytes | None) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield where some lines at a time begin, and how often the mark stands in one of them at most; last the end."""
    size = path.stat().st_size
    bar = Progress(console=Console(stderr=True), transient=True, disable=size < _SMALL)
    with path.open("rb") as file, bar:
        task = bar.add_task(f"finding the lines of {path.name}", total=size)
        at, rest = len(_BYTE_ORDER), b""
        if file.read(at) != _BYTE_ORDER:
            at = file.seek(0)
        while piece := file.read(_CHUNK):
            text = rest + piece
            whole = text.rfind(b"\n") + 1
            yield _starts(text[:whole], at, mark)
            at, rest = at + whole, text[whole:]
            if len(rest) > _LONGEST:
                raise DataError(f"{path} has a line of more than {_LONGEST >> 20} MB, at byte {at}: it is no text.")
            bar.advance(task, len(piece))
        yield _starts(rest, at, mark)
        yield np.array([at + len(rest)], dtype=np.int64), 0


def _starts(text: bytes, at: int, mark: bytes | None) -> tuple[NDArray[np.int64], int]:
    """Return where the lines of `text` begin, which itself begins at byte `at` of a file, and the most marks of one."""
    if not text:
        return np.zeros(0, np.int64), 0
    letters = np.frombuffer(text, dtype=np.uint8)
    ends: NDArray[Any] = np.flatnonzero(letters == ord("\n"))
    if not text.endswith(b"\n"):
        ends = np.append(ends, len(text))
    starts = np.concatenate([[0], ends[:-1] + 1])
    blank = (ends == starts) | ((ends == starts + 1) & (letters[np.minimum(starts, len(text) - 1)] == ord("\r")))
    if mark is None:
        return starts[~blank] + at, 0
    marks = np.searchsorted(np.flatnonzero(letters == mark[0]), np.stack([starts, ends]))
    return starts[~blank] + at, int((marks[1] - marks[0]).max())
