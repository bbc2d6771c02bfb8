"""How a rank's end is told: written by the rank that fails, read by whoever started it.

One rank's error ends the others a moment later with broken connections; those are victims, and this module tells them
from the cause. Knows exceptions and files, nothing of processes.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import paceline.errors
from paceline.errors import PacelineError

# What gloo, NCCL and TCP say to a rank whose peer has gone. They come as RuntimeError, so the words must tell.
_BROKEN = ("gloo/transport", "connection closed by peer", "connection reset by peer", "broken pipe", "remote process")
_BROKEN_KINDS = ("DistBackendError", "DistNetworkError", "DistStoreError")


@dataclass(frozen=True)
class Failure:
    """An error that ended a rank.

    Attributes:
        rank: which one.
        at: when, in seconds since the epoch.
        kind: name of the exception's class.
        message: its text.
        trace: its traceback as Python prints it.
        exit_code: what the rank ends with.
        is_ours: the class is a `PacelineError`, whose message is enough.
        is_victim: not ours, and a connection broke; some other rank is likely the cause.
    """

    rank: int
    at: float
    kind: str
    message: str
    trace: str
    exit_code: int
    is_ours: bool
    is_victim: bool

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Self:
        """Describe `error`, which ends `rank` now."""
        ours = isinstance(error, PacelineError)
        return cls(
            rank=rank,
            at=time.time(),
            kind=type(error).__name__,
            message=str(error),
            trace="".join(traceback.format_exception(error)),
            exit_code=error.exit_code if isinstance(error, PacelineError) else 1,
            is_ours=ours,
            is_victim=not ours and any(_is_broken_connection(link) for link in _chain(error)),
        )

    def write(self, directory: Path) -> None:
        """Leave this in `directory`; whole, or not at all."""
        partial = directory / f"failure-{self.rank}.partial"
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(partial, _path(directory, self.rank))

    def error(self) -> PacelineError | None:
        """Return the same error anew, where it was raised on purpose."""
        if not self.is_ours:
            return None
        kind = getattr(paceline.errors, self.kind, PacelineError)
        # Subclasses may take other arguments than a message; what the reader needs is message and exit code.
        error: PacelineError = kind.__new__(kind, self.message)
        error.exit_code = self.exit_code
        return error


def read_failures(directory: Path, ranks: int) -> dict[int, Failure]:
    """Return the failures left in `directory` so far, by rank."""
    paths = {rank: _path(directory, rank) for rank in range(ranks)}
    return {
        rank: Failure(**json.loads(path.read_text(encoding="utf-8"))) for rank, path in paths.items() if path.exists()
    }


def first_cause(failures: Collection[Failure]) -> Failure:
    """Return the one that brought down the others: the earliest that is not a broken connection, if there is one.

    Among victims, a rank that left no word was ended from outside, and broke the connections that the others tell of.
    """

    def order(failure: Failure) -> tuple[bool, bool, float, int]:
        return failure.is_victim, failure.is_victim and bool(failure.trace), failure.at, failure.rank

    return min(failures, key=order)


def _path(directory: Path, rank: int) -> Path:
    return directory / f"failure-{rank}.json"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and what it was raised from or during."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, ConnectionError) or type(error).__name__ in _BROKEN_KINDS:
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in words for phrase in _BROKEN)
