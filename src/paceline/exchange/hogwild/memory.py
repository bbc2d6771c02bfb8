"""The memory that Hogwild's workers share: a file of the run that each of them maps.

It outlives its workers, and nothing has to be removed from `/dev/shm` after them. Memory is taken before it is written
to, so that a full disk is an error and not a killed process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ExchangeError
from paceline.exchange.hogwild.layout import WORKERS, Region, digest, regions
from paceline.exchange.job import Job
from paceline.exchange.wire.address import machine

_MAGIC: Final = 0x5041434548474D31
_MAGIC_AT, _DIGEST_AT, _ROWS_AT, _WORKERS_AT, _HOST_AT, _TABLES_AT = 0, 1, 2, 3, 4, 8
_MOST_TABLES: Final = 200
_BLOCK_BYTES: Final = 512
"""Of `st_blocks`, whatever the file system."""
_CHUNK_BYTES: Final = 1 << 20
"""By how much the memory of rows grows, at least."""


class Memory:
    """Arrays in a file, by name (`layout.regions`). Made by `snapshot.begin`, or `attach`."""

    def __init__(self, path: Path, job: Job, rows: int) -> None:
        self.path = path
        self.job = job
        self.rows = rows
        self._regions = {region.name: region for region in regions(job, rows)}
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._lock = threading.Lock()
        size = max(region.offset + region.size_bytes for region in self._regions.values())
        found = os.fstat(self._file).st_size
        if found < size:
            raise ExchangeError(f"{path} has {found} bytes, and this job needs {size}; it is of another job.")
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
        self._header = self.array("header")

    @classmethod
    def create(cls, path: Path, job: Job, fill: Callable[[Self], None], rows: int) -> Self:
        """Make the memory of a job, in whole or not at all.

        Args:
            path: of its file.
            job: what is kept.
            fill: writes what it begins with; it is all zeros.
            rows: how many each sparse table may have.

        Raises:
            ExchangeError: a table is of a type that is not for it, or there is no room.
        """
        if len(job.tables) > _MOST_TABLES:
            raise ExchangeError(
                f"the job has {len(job.tables)} tables; in shared memory it has {_MOST_TABLES} at most."
            )
        needed = regions(job, rows)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                os.ftruncate(file.fileno(), max(region.offset + region.size_bytes for region in needed))
                for region in needed:
                    if not region.grows and region.size_bytes:
                        os.posix_fallocate(file.fileno(), region.offset, region.size_bytes)
            made = cls(draft, job, rows)
            made._header[[_DIGEST_AT, _ROWS_AT, _HOST_AT]] = digest(job), rows, _host()
            fill(made)
            made._header[_MAGIC_AT] = _MAGIC
            draft.replace(path)
        except OSError as error:
            raise ExchangeError(f"cannot make the shared memory {path} ({error.strerror}); make room.") from error
        finally:
            draft.unlink(missing_ok=True)
        made.path = path
        return made

    @classmethod
    def attach(cls, path: Path, job: Job) -> Self:
        """Map the memory of a job that runs.

        Raises:
            ExchangeError: there is none, or it is of another job.
        """
        try:
            with path.open("rb") as file:
                header = np.frombuffer(file.read(8 * _TABLES_AT).ljust(8 * _TABLES_AT, b"\0"), dtype=np.int64)
        except OSError as error:
            raise ExchangeError(
                f"cannot open the shared memory {path} ({error.strerror}); it is made where the run is started, and is "
                "for workers of that host."
            ) from error
        if header[_MAGIC_AT] != _MAGIC or header[_DIGEST_AT] != digest(job):
            raise ExchangeError(f"{path} is not the memory of this job; give the directory of the run to join.")
        if header[_HOST_AT] != _host():
            raise ExchangeError(
                f"{path} is the memory of another host; workers of hogwild are all on the one that has it."
            )
        return cls(path, job, int(header[_ROWS_AT]))

    def array(self, name: str) -> NDArray[Any]:
        """Return an array of the memory itself."""
        region = self._regions[name]
        part: NDArray[Any] = self._bytes[region.offset : region.offset + region.size_bytes]
        return part.view(np.ndarray).view(region.dtype).reshape(region.shape)

    @property
    def memory_bytes(self) -> int:
        """What it takes, of the disk and in memory at most."""
        return os.fstat(self._file).st_blocks * _BLOCK_BYTES

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one of all processes that adds rows or workers. Who is killed meanwhile lets go."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def next_worker(self) -> int:
        """Return a number that no worker of this memory had before.

        Raises:
            ExchangeError: there were too many.
        """
        with self.alone():
            number = int(self._header[_WORKERS_AT])
            if number == WORKERS:
                raise ExchangeError(f"{WORKERS} workers have joined {self.path} already; start the run anew.")
            self._header[_WORKERS_AT] += 1
        return number

    def made(self, table: int) -> int:
        """Return how many rows a sparse table has."""
        return int(self._header[_TABLES_AT + 2 * table])

    def set_made(self, table: int, count: int) -> None:
        """Say how many rows a sparse table has, once they are there. Only within `alone`."""
        self._header[_TABLES_AT + 2 * table] = count

    def reserve(self, table: int, count: int) -> None:
        """Take memory for so many rows of a sparse table. Only within `alone`.

        Raises:
            ExchangeError: there may not be as many, or there is no room on the disk.
        """
        at = _TABLES_AT + 2 * table + 1
        reserved = int(self._header[at])
        if count <= reserved:
            return
        if count > self.rows:
            raise ExchangeError(
                f"table {self.job.tables[table].name} is full: the shared memory was made for {self.rows} rows. Start "
                "the run with more (server.rows in its recipe)."
            )
        growing = [r for r in self._regions.values() if r.grows and r.name.startswith(f"{table}.")]
        row_bytes = sum(region.size_bytes for region in growing) // self.rows
        target = min(self.rows, max(count, reserved + reserved // 2, _CHUNK_BYTES // row_bytes))
        try:
            for region in growing:
                self._take(region, reserved, target)
        except OSError as error:
            raise ExchangeError(
                f"no room for rows {reserved} to {target} of table {self.job.tables[table].name} in {self.path} "
                f"({error.strerror}); make room."
            ) from error
        self._header[at] = target

    def _take(self, region: Region, reserved: int, target: int) -> None:
        row_bytes = region.size_bytes // self.rows
        os.posix_fallocate(self._file, region.offset + reserved * row_bytes, (target - reserved) * row_bytes)


def _host() -> int:
    """Return what tells hosts apart: what they map of one file, over a network, is not the same memory."""
    return int.from_bytes(hashlib.blake2b(machine().encode(), digest_size=7).digest(), "little")
