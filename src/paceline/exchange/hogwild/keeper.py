"""Who keeps Hogwild's memory for a job: `python -m paceline.exchange.hogwild.keeper DIRECTORY`, on the workers' host.

To the coordinator it is the one server of the job, so that tasks are dealt, snapshots made and runs resumed as ever. It
makes the memory, and writes it down when asked; what workers read and push does not pass through it. When it is killed
the memory stays: workers end their tasks and wait for the next keeper, which finds it as they left it.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import queue
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from paceline.errors import ExchangeError, PacelineError
from paceline.exchange.directory import Directory
from paceline.exchange.hogwild.memory import Memory
from paceline.exchange.hogwild.snapshot import begin, write_part
from paceline.exchange.membership import Member, Role, SnapshotRequest
from paceline.exchange.view import Address
from paceline.exchange.wire.address import machine

_REPORT_S: Final = 0.5
"""Between reports of figures."""

_log = logging.getLogger(__name__)


def keep(directory: Directory, rows: int = 1 << 22) -> None:
    """Keep the memory of a job until the job is over.

    Args:
        directory: of the job's exchange.
        rows: how many each sparse table may have.

    Raises:
        ExchangeError: there is no coordinator or no room, or the job failed.
    """
    charter = directory.read()
    job = charter.job
    if directory.memory.exists():
        memory = Memory.attach(directory.memory, job)
    else:
        memory = begin(directory.memory, job, directory.snapshot(charter.terms.restored), rows=rows)
    member = Member.join(charter, directory.read_secret(), Role.SERVER, Address(machine=machine()))
    _log.info("this is server %d, process %d: the shared memory is %s", member.id, os.getpid(), memory.path)
    happened: queue.SimpleQueue[SnapshotRequest | str] = queue.SimpleQueue()
    member.on_snapshot(happened.put)
    member.on_fenced(happened.put)
    member.on_end(happened.put)
    try:
        figures = _Figures(memory)
        while True:
            try:
                what = happened.get(timeout=_REPORT_S)
            except queue.Empty:
                member.report(figures.now())
                continue
            if isinstance(what, SnapshotRequest):
                _write(memory, directory, what, member)
            elif what:
                raise ExchangeError(what)
            else:
                memory.path.unlink(missing_ok=True)  # what was learnt is in the last snapshot
                return
    finally:
        member.close()


def attach(directory: Directory, member: Member) -> Memory:
    """Return the memory of a job, once its keeper has made it.

    Raises:
        ExchangeError: it is of another job or host.
    """
    while not member.view.chains and not member.ended and not member.fenced:
        member.wait_for_view(member.view.epoch, 1)
    return Memory.attach(directory.memory, directory.read().job)


def _write(memory: Memory, directory: Directory, request: SnapshotRequest, member: Member) -> None:
    try:
        for shard in request.shards:
            name = write_part(memory, directory.snapshots, request.number, request.clock, shard)
            member.snapshot_written(request.number, shard, name)
    except ExchangeError as error:
        _log.warning("snapshot %d: %s", request.number, error)
        member.snapshot_failed(request.number, str(error))


class _Figures:
    """What there is to see, under the names that servers use (`server.figures`)."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._counters = memory.array("updates")[:, 0]
        self._before = (time.monotonic(), int(self._counters.sum()))

    def now(self) -> dict[str, Any]:
        """Return all figures, as plain values for JSON."""
        now, updates, before = time.monotonic(), int(self._counters.sum()), self._before
        self._before = (now, updates)
        return {
            "updates": updates,
            "updates_per_s": (updates - before[1]) / max(now - before[0], 1e-9),
            "master_of": self._memory.job.shards,
            "memory_bytes": self._memory.memory_bytes,
        }


def main() -> int:
    """Keep the memory until the job is over."""
    parser = argparse.ArgumentParser(prog="python -m paceline.exchange.hogwild.keeper", description=__doc__)
    parser.add_argument("directory", type=Path, help="of the job's exchange")
    parser.add_argument("--rows", type=int, default=1 << 22, help="how many rows each sparse table may have")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.register(signal.SIGUSR1)
    try:
        keep(Directory(given.directory), given.rows)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
