"""The replay of a run from what is in its directory, compared with the snapshot that it ended with, or with what it
went on from in another directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ExchangeError
from paceline.exchange.client.actions import Actions, read_actions
from paceline.exchange.client.outgoing import Compressor
from paceline.exchange.directory import Directory
from paceline.exchange.replay.compare import Difference, difference
from paceline.exchange.replay.replay import Replay, Work
from paceline.exchange.shard.log import read_updates
from paceline.exchange.shard.manifest import Manifest, whole_snapshots
from paceline.exchange.shard.shard import Shard, ShardState
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
        snapshot: directory of the one to stop at; None: the last one that is whole.
        follows: directory of the exchange that went on from there: what that began with is what is to come out.
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
        snapshot: Path | None = None,
        follows: Directory | None = None,
        compression: Callable[[], Compressor] | None = None,
        others: Sequence[Actions] = (),
    ) -> None:
        charter = directory.read()
        job, terms = charter.job, charter.terms
        if not charter.log:
            raise ExchangeError(f"the job in {directory.root} was run without a log; it cannot be replayed.")
        self.job = job
        written = snapshot or directory.snapshot(_newest(directory, terms))
        if int(written.name) not in whole_snapshots(written.parent):
            raise ExchangeError(f"there is no snapshot {written.name} in {written.parent} to compare with.")
        manifest = Manifest.read(written)
        self.snapshot = manifest.number
        shards = [load_shard(directory.snapshot(terms.restored), job, shard) for shard in range(job.shards)]
        after = {shard.number: shard.position for shard in shards}
        at_end = manifest.first_task >= terms.tasks
        stops = {shard: load_shard(written, job, shard).state() for shard in range(job.shards)}
        marks = {shard: int(state.meta["position"]) for shard, state in stops.items()}
        self._wanted = stops if follows is None else _beginning(follows)
        records = read_updates(sorted(directory.root.glob("updates/server-*.log")), after, marks if at_end else None)
        paths = sorted(directory.root.glob("actions/worker-*.jsonl"))
        actions = [read_actions(path) for path in paths if path.stat().st_size]  # else it was killed as it began
        self.workers = len(actions)
        self.updates = sum(marks[shard] - after[shard] for shard in marks)
        self.replay = Replay(job, shards, records, actions, marks, compression, others)

    def difference(self, carried: Callable[[Sequence[Shard]], None] = lambda _: None) -> Difference | None:
        """Return the first difference; None: all is the same, bit for bit. Of one that is complete.

        Args:
            carried: changes shards as they were changed after the snapshot was taken.
        """
        shards = [Shard.of(self.job, number, self.replay.states[number]) for number in range(self.job.shards)]
        carried(shards)
        for shard in shards:
            found = difference(self.job, shard.number, self._wanted[shard.number], shard.state())
            if found is not None:
                return found
        return None


def replay(
    directory: Directory,
    work: Work,
    *,
    snapshot: int | None = None,
    follows: Directory | None = None,
    compression: Callable[[], Compressor] | None = None,
) -> Outcome:
    """Run a job once more and compare what comes out with a snapshot of it.

    Args:
        directory: of the job's exchange, with the logs of all its servers and workers.
        work: the loop of its workers, as they ran it.
        snapshot: its number; None: the last one that is whole.
        follows: see `Rerun`; it names the snapshot then.
        compression: makes for a worker what its gradients went through; None: they went as they were.

    Raises:
        ExchangeError: there is nothing to compare with, logs are missing, or workers did something else this time.
    """
    began = time.monotonic()
    number = snapshot if follows is None else follows.read().terms.restored
    place = None if number is None else directory.snapshot(number)
    rerun = Rerun(directory, snapshot=place, follows=follows, compression=compression)
    rerun.replay.run(work)
    return Outcome(rerun.snapshot, rerun.updates, rerun.workers, rerun.difference(), time.monotonic() - began)


def has_snapshot(directory: Directory) -> bool:
    """Whether a job has written a snapshot later than the one that it began with."""
    restored = directory.read().terms.restored
    return any(number > restored for number in whole_snapshots(directory.snapshots))


def _newest(directory: Directory, terms: Terms) -> int:
    """Return the snapshot to compare with; that which the job began with where it was at its end then."""
    if terms.first_task >= terms.tasks:
        return terms.restored
    later = [number for number in whole_snapshots(directory.snapshots) if number > terms.restored]
    if not later:
        raise ExchangeError(
            f"{directory.snapshots} has no snapshot later than {terms.restored}: the run's result is needed to compare "
            "with."
        )
    return later[-1]


def _beginning(directory: Directory) -> dict[int, ShardState]:
    """Return what a job began with."""
    charter = directory.read()
    place, job = directory.snapshot(charter.terms.restored), charter.job
    return {shard: load_shard(place, job, shard).state() for shard in range(job.shards)}
