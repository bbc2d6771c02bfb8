"""The order in which servers applied updates, written as they do; and what they agree on, read again for a replay.

A file is its header, then records of 64-bit numbers (little-endian): number of tasks, epoch, shard, position, worker,
sequence, staleness, the tasks, and a CRC-32 of all that. A batch is one write, so a killed process leaves whole
records; a machine that lost power may have lost the end, but for what was settled before.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from paceline.durable import settle
from paceline.errors import ExchangeError
from paceline.exchange.shard.settling import Settling

_HEADER: Final = struct.Struct("<16sq")
_MAGIC: Final = b"paceline updates"
_FIXED: Final = 7
_WORD: Final = 8


class Record(NamedTuple):
    """An update that a server applied.

    Attributes:
        epoch: of the server, when it did.
        shard: to which.
        position: the shard's number of updates with it.
        worker, sequence, tasks: see `updates.Update`.
        staleness: see `updates.Applied`.
    """

    epoch: int
    shard: int
    position: int
    worker: int
    sequence: int
    staleness: int
    tasks: tuple[int, ...]


class UpdateLog:
    """The log of one server; goes on where there is one. For one thread.

    Args:
        path: of the file; its directory is made.
        server: whose it is.

    Raises:
        ExchangeError: the file cannot be written, or is something else.
    """

    def __init__(self, path: Path, server: int) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            settle(path.parent)
        except OSError as error:
            raise self._failed(error) from error
        self._size = 0
        self._settling = Settling(self._file, lambda: self._size)
        content = path.read_bytes()
        if len(content) < _HEADER.size or not any(content):
            os.ftruncate(self._file, 0)
            self._write(_HEADER.pack(_MAGIC, server))
            return
        self._size = _HEADER.size + sum(len(_bytes(record)) for record in _records(path, content))
        os.ftruncate(self._file, self._size)

    def append(self, records: Iterable[Record]) -> None:
        """Write records, all at once.

        Raises:
            ExchangeError: they cannot be written; none of them is in the file then.
        """
        content = b"".join(map(_bytes, records))
        if content:
            self._write(content)

    def settle(self) -> None:
        """Return once all that was appended before outlives a loss of power. Any thread.

        Raises:
            ExchangeError: the disk failed.
        """
        try:
            self._settling.settle()
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, content: bytes) -> None:
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(self._file, content[done:], self._size + done)
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise self._failed(error) from error
        self._size += len(content)

    def _failed(self, error: OSError) -> ExchangeError:
        return ExchangeError(
            f"cannot write {self._path} ({error.strerror}); without it the run cannot be replayed: make room, or "
            "switch the log off."
        )


def read_log(path: Path) -> list[Record]:
    """Return the records of a server's log, in the order in which it applied them.

    Raises:
        ExchangeError: it cannot be read, or is damaged elsewhere than at its end.
    """
    try:
        return list(_records(path, path.read_bytes()))
    except OSError as error:
        raise ExchangeError(f"cannot read the log of updates {path} ({error.strerror}).") from error


def read_updates(
    paths: Iterable[Path], after: Mapping[int, int] | None = None, final: Mapping[int, int] | None = None
) -> dict[int, list[Record]]:
    """Return what was applied to each shard, in order, as all servers have it.

    A server that was killed or cut off may have applied what never was committed. Its successor has applied something
    else at that position then, in a later epoch, which is what counts; or nothing, which the final position tells.

    Args:
        paths: logs of all servers that there ever were.
        after: of each shard the position to begin after, such as that of a snapshot; without, from its first record.
        final: of each shard its last position, where it is known.

    Raises:
        ExchangeError: servers disagree, a position is missing, or a task was applied twice.
    """
    found: dict[tuple[int, int], tuple[Record, Path]] = {}
    for path in paths:
        for record in read_log(path):
            _put(found, record, path)
    by_shard: dict[int, list[Record]] = {
        shard: [] for shard in sorted({*(final or {}), *(shard for shard, _ in found)})
    }
    for (shard, position), (record, _) in sorted(found.items()):
        if (after or {}).get(shard, 0) < position <= (final or {}).get(shard, sys.maxsize):
            by_shard[shard].append(record)
    for shard, records in by_shard.items():
        first = after[shard] + 1 if after is not None and shard in after else None
        _check(shard, records, first, None if final is None else final.get(shard))
    return by_shard


def _put(found: dict[tuple[int, int], tuple[Record, Path]], record: Record, path: Path) -> None:
    at = record.shard, record.position
    other, elsewhere = found.get(at, (record, path))
    if other.epoch == record.epoch and other != record:
        raise ExchangeError(
            f"servers disagree about position {record.position} of shard {record.shard} in epoch {record.epoch}: "
            f"{elsewhere} has update {other.sequence} of worker {other.worker}, {path} has {record.sequence} of "
            f"{record.worker}. The run cannot be replayed; please report this."
        )
    if at not in found or record.epoch > other.epoch:
        found[at] = record, path


def _check(shard: int, records: list[Record], first: int | None, last: int | None) -> None:
    """Check that positions are there from first to last, and that each task is there once."""
    expected = first if first is not None else records[0].position if records else 1
    tasks: dict[int, int] = {}
    for record in records:
        if record.position != expected:
            break
        expected += 1
        for task in record.tasks:
            if task in tasks:
                raise ExchangeError(
                    f"task {task} was applied twice to shard {shard}, at {tasks[task]} and {record.position}; please "
                    "report this."
                )
            tasks[task] = record.position
    last = last if last is not None else records[-1].position if records else expected - 1
    if expected <= last:
        raise ExchangeError(
            f"no log has position {expected} of shard {shard}, of {last}; give the logs of all servers of the run, "
            "those that were killed too."
        )


def _bytes(record: Record) -> bytes:
    epoch, shard, position, worker, sequence, staleness, tasks = record
    numbers = (len(tasks), epoch, shard, position, worker, sequence, staleness, *tasks)
    content = struct.pack(f"<{len(numbers)}q", *numbers)
    return content + struct.pack("<q", zlib.crc32(content))


def _records(path: Path, content: bytes) -> Iterator[Record]:
    """Read records up to the end, or to where the last one breaks off."""
    if not any(content):  # its server was killed, or lost its power, before it wrote anything
        return
    if len(content) < _HEADER.size or _HEADER.unpack_from(content)[0] != _MAGIC:
        raise ExchangeError(f"{path} is no log of updates; it does not begin like one.")
    at = _HEADER.size
    while at < len(content):
        rest = len(content) - at
        count = struct.unpack_from("<q", content, at)[0] if rest >= _WORD else 0
        size = (_FIXED + max(count, 0) + 1) * _WORD
        if size > rest:
            return
        numbers = struct.unpack_from(f"<{size // _WORD}q", content, at)
        if count < 0 or numbers[-1] != zlib.crc32(content[at : at + size - _WORD]):
            if size == rest or not any(content[at:]):
                return
            raise ExchangeError(f"{path} is damaged at byte {at}; what follows cannot be trusted.")
        epoch, shard, position, worker, sequence, staleness = numbers[1:_FIXED]
        yield Record(epoch, shard, position, worker, sequence, staleness, numbers[_FIXED:-1])
        at += size
