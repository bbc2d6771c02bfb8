"""The run of a job once more, from the logs of its servers and workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from paceline.errors import ExchangeError
from paceline.exchange.client.actions import Actions
from paceline.exchange.client.outgoing import Compressor
from paceline.exchange.interface import Dealer, Fetching
from paceline.exchange.job import Job
from paceline.exchange.replay.baton import Runner, run
from paceline.exchange.replay.exchange import ReplayedDealer, ReplayedExchange
from paceline.exchange.replay.serial import Lines
from paceline.exchange.shard.log import Record
from paceline.exchange.shard.shard import Shard, ShardState

Work: TypeAlias = Callable[[int, Fetching, Dealer], None]
"""The loop of a worker: given its id, parameters and who deals tasks, it works until it is told that all is done."""


class Replay:
    """A run once more.

    Args:
        job: what was kept.
        shards: as they were when the run began; they are used up.
        records: of each shard its updates in order (`shard.log.read_updates`).
        actions: of each worker what it did (`client.actions.read_actions`).
        marks: of each shard the position of the state that is wanted.
        compression: makes for a worker what its gradients went through; None: they went as they were.
        others: what others read and pushed, who are no workers of this job alone (`exchange`).

    Attributes:
        lines: the shards.
        states: of each shard, once it was at its mark.
    """

    def __init__(
        self,
        job: Job,
        shards: Sequence[Shard],
        records: Mapping[int, Sequence[Record]],
        actions: Sequence[Actions],
        marks: Mapping[int, int],
        compression: Callable[[], Compressor] | None = None,
        others: Sequence[Actions] = (),
    ) -> None:
        self._job = job
        self._actions = sorted(actions, key=lambda held: held.worker)
        self._compression = compression
        self.states: dict[int, ShardState] = {}

        def keep(shard: Shard) -> None:
            self.states[shard.number] = shard.state()

        self.lines = Lines(shards, records, _reads([*actions, *others]), marks, keep)

    @property
    def complete(self) -> bool:
        """Whether all marks were reached."""
        return self.lines.complete

    def runners(self, work: Work) -> list[Runner]:
        """Return the workers, none of which runs yet."""
        return [Runner(f"worker {actions.worker}", partial(self._work, work, actions)) for actions in self._actions]

    def run(self, work: Work) -> dict[int, ShardState]:
        """Run all workers, one at a time; returns the state of each shard at its mark.

        Raises:
            ExchangeError: the logs do not belong together, or a worker did not do what it did.
        """
        together([self], self.runners(work))
        return self.states

    def exchange(self, actions: Actions, runner: Runner, pushed: int = 0) -> ReplayedExchange:
        """Return what one of the others sees. pushed: updates that it had pushed before the run began."""
        return ReplayedExchange(self._job, actions, self.lines, runner, pushed=pushed)

    def _work(self, work: Work, actions: Actions, runner: Runner) -> None:
        compression = None if self._compression is None else self._compression()
        exchange = ReplayedExchange(self._job, actions, self.lines, runner, compression)
        try:
            work(actions.worker, exchange, ReplayedDealer(actions))
        finally:
            exchange.end()


def together(
    replays: Sequence[Replay], runners: Sequence[Runner], lacking: Callable[[], Sequence[str]] = tuple[str, ...]
) -> None:
    """Run all that take part, one at a time, until all marks of all replays are reached.

    Args:
        replays: of jobs.
        runners: who takes part.
        lacking: what else is to be reached, in words; empty once it is.

    Raises:
        ExchangeError: they cannot go on, or one did not do what it did.
    """

    def complete() -> bool:
        return all(replay.complete for replay in replays) and not lacking()

    run(runners, complete)
    if not complete():
        lacks = [lack for replay in replays for lack in replay.lines.lacks()] + list(lacking())
        raise ExchangeError(
            f"the replay cannot go on: {'; '.join(lacks[:4])}. A log is missing, of a server or a worker, or what a "
            "worker does depends on more than it reads and is dealt."
        )


def _reads(everybody: Sequence[Actions]) -> dict[int, list[int]]:
    """Return of each shard at which positions it was read."""
    reads: dict[int, list[int]] = {}
    for actions in everybody:
        for positions in actions.pulls.values():
            for shard, position in (positions or {}).items():
                reads.setdefault(shard, []).append(position)
    return reads
