"""The replay of a run from what is in its directory, compared with the snapshot that it ended with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import ExchangeError
from paceline.exchange.client.actions import Actions, read_actions
from paceline.exchange.client.outgoing import Compressor
from paceline.exchange.directory import Directory
from paceline.exchange.replay.compare import Difference, difference
from paceline.exchange.replay.replay import Replay, Work
from paceline.exchange.shard.log import read_updates
from paceline.exchange.shard.manifest import Manifest, whole_snapshots
from paceline.exchange.shard.snapshot import load_shard
from paceline.exchange.terms import Terms


@dataclass(frozen=True)
class Outcome:
    """What came of a replay.

    Attributes:
        snapshot: that it was compared with.
        updates: applied, over all shards.
        workers: that ran.
        difference: the first one; None: it is the same, bit for bit.
        seconds: that it took.
    """

    snapshot: int
    updates: int
    workers: int
    difference: Difference | None
    seconds: float


class Rerun:
    """The replay of one job, as its directory tells.

    Args:
        directory: of the job's exchange, with the logs of all its servers and workers.
        snapshot: its number, to compare with; None: the last one that is whole.
        compression: makes for a worker what its gradients went through; None: they went as they were.
        others: see `Replay`.

    Attributes:
        job: what was kept.
        snapshot: its number.
        updates, workers: how many there are.

    Raises:
        ExchangeError: there is nothing to compare with, or logs are missing.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        snapshot: int | None = None,
        compression: Callable[[], Compressor] | None = None,
        others: Sequence[Actions] = (),
    ) -> None:
        charter = directory.read()
        job, terms = charter.job, charter.terms
        if not charter.log:
            raise ExchangeError(f"the job in {directory.root} was run without a log; it cannot be replayed.")
        self.job = job
        self.snapshot = _chosen(directory, terms, snapshot)
        written = directory.snapshot(self.snapshot)
        shards = [load_shard(directory.snapshot(terms.restored), job, shard) for shard in range(job.shards)]
        after = {shard.number: shard.position for shard in shards}
        at_end = Manifest.read(written).first_task >= terms.tasks
        self._wanted = {shard: load_shard(written, job, shard).state() for shard in range(job.shards)}
        marks = {shard: int(state.meta["position"]) for shard, state in self._wanted.items()}
        records = read_updates(sorted(directory.root.glob("updates/server-*.log")), after, marks if at_end else None)
        actions = [read_actions(path) for path in sorted(directory.root.glob("actions/worker-*.jsonl"))]
        self.workers = len(actions)
        self.updates = sum(marks[shard] - after[shard] for shard in marks)
        self.replay = Replay(job, shards, records, actions, marks, compression, others)

    @property
    def difference(self) -> Difference | None:
        """The first one; None: all is the same, bit for bit. Of one that is complete."""
        states = self.replay.states
        found = (difference(self.job, shard, self._wanted[shard], states[shard]) for shard in range(self.job.shards))
        return next((one for one in found if one is not None), None)


def replay(
    directory: Directory,
    work: Work,
    *,
    snapshot: int | None = None,
    compression: Callable[[], Compressor] | None = None,
) -> Outcome:
    """Run a job once more and compare what comes out with a snapshot of it.

    Args:
        directory: of the job's exchange, with the logs of all its servers and workers.
        work: the loop of its workers, as they ran it.
        snapshot: its number; None: the last one that is whole.
        compression: makes for a worker what its gradients went through; None: they went as they were.

    Raises:
        ExchangeError: there is nothing to compare with, logs are missing, or workers did something else this time.
    """
    began = time.monotonic()
    rerun = Rerun(directory, snapshot=snapshot, compression=compression)
    rerun.replay.run(work)
    return Outcome(rerun.snapshot, rerun.updates, rerun.workers, rerun.difference, time.monotonic() - began)


def _chosen(directory: Directory, terms: Terms, snapshot: int | None) -> int:
    """Return the snapshot to compare with."""
    later = [number for number in whole_snapshots(directory.snapshots) if number > terms.restored]
    number = snapshot if snapshot is not None else max(later, default=None)
    if number is None or number not in later:
        raise ExchangeError(
            f"{directory.snapshots} has no snapshot {'later than' if number is None else number} "
            f"{terms.restored if number is None else ''}: the run's result is needed to compare with. There are "
            f"{later or 'none'}."
        )
    return number
