"""What must outlive the coordinator: a journal of records, and one coordinator at a time.

What was appended is there after the coordinator was killed; what is `durable` also after the host lost its power.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from paceline.durable import settle
from paceline.errors import ExchangeError

Record: TypeAlias = dict[str, Any]


class Store(Protocol):
    """A journal."""

    def load(self) -> list[Record]:
        """Take charge, and return all records, in order.

        Raises:
            ExchangeError: another coordinator is in charge, or what is there cannot be read.
        """
        ...

    def append(self, records: Sequence[Record], durable: bool) -> None:
        """Add records, all or none.

        Raises:
            ExchangeError: they cannot be kept, or another coordinator took charge.
        """
        ...

    def replace(self, record: Record) -> None:
        """Have one record stand for all so far."""
        ...

    @property
    def appended(self) -> int:
        """Number of records since the last `replace`."""
        ...

    def close(self) -> None:
        """Let others take charge."""
        ...


class Journal:
    """A file to which lines are appended, each with its checksum; the embedded store.

    Args:
        directory: of the file and its lock.
    """

    _NAME: Final = "records"

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._path = directory, directory / self._NAME
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._file = -1
        self._appended = 0

    @property
    def appended(self) -> int:
        """See `Store`."""
        return self._appended

    def load(self) -> list[Record]:
        """See `Store`."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ExchangeError(
                f"a coordinator of this job is running: it holds {self._directory / 'lock'}. One is enough; it may be "
                "killed and started again."
            ) from None
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        records, whole_bytes = self._read()
        os.ftruncate(self._file, whole_bytes)  # a line that was being written when the host went down
        settle(self._directory)
        self._appended = len(records)
        return records

    def append(self, records: Sequence[Record], durable: bool) -> None:
        """See `Store`."""
        data = b"".join(map(_line, records))
        try:
            written = os.write(self._file, data)
            if written != len(data):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise ExchangeError(f"cannot write to {self._path}: the disk is full. Free some, and start it again.")
            if durable:
                os.fdatasync(self._file)
        except OSError as error:
            raise ExchangeError(f"cannot write to {self._path}: {error.strerror}.") from error
        self._appended += len(records)

    def replace(self, record: Record) -> None:
        """See `Store`."""
        draft = self._path.with_suffix(".new")
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            with os.fdopen(os.dup(file), "wb") as out:
                out.write(_line(record))
            os.fsync(file)
            draft.replace(self._path)
            settle(self._directory)
        except OSError as error:
            os.close(file)
            raise ExchangeError(f"cannot write {draft}: {error.strerror}.") from error
        os.close(self._file)
        self._file, self._appended = file, 0

    def close(self) -> None:
        """See `Store`."""
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1

    def _read(self) -> tuple[list[Record], int]:
        data = self._path.read_bytes()
        records, at = [], 0
        while (end := data.find(b"\n", at)) >= 0:
            record = _record(data[at:end])
            if record is None:
                break
            records.append(record)
            at = end + 1
        if b"\n" in data[at:].rstrip(b"\n"):  # not the last line
            raise ExchangeError(
                f"{self._path} is damaged at byte {at}: the coordinator cannot know what it promised. Begin again from "
                "a snapshot."
            )
        return records, at


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> Record | None:
    checksum, _, text = line.partition(b" ")
    if len(checksum) != 8 or b"%08x" % zlib.crc32(text) != checksum:
        return None
    record: Record = json.loads(text)
    return record
