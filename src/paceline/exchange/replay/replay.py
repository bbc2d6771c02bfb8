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
    """

    def __init__(
        self,
        job: Job,
        shards: Sequence[Shard],
        records: Mapping[int, Sequence[Record]],
        actions: Sequence[Actions],
        marks: Mapping[int, int],
        compression: Callable[[], Compressor] | None = None,
    ) -> None:
        self._job, self._shards, self._records, self._marks = job, shards, records, marks
        self._actions = sorted(actions, key=lambda held: held.worker)
        self._compression = compression

    def run(self, work: Work) -> dict[int, ShardState]:
        """Run all workers, one at a time; returns the state of each shard at its mark.

        Raises:
            ExchangeError: the logs do not belong together, or a worker did not do what it did.
        """
        states: dict[int, ShardState] = {}

        def keep(shard: Shard) -> None:
            states[shard.number] = shard.state()

        lines = Lines(self._shards, self._records, self._reads(), self._marks, keep)
        runners = [
            Runner(f"worker {actions.worker}", partial(self._work, work, actions, lines)) for actions in self._actions
        ]
        run(runners, lambda: lines.complete)
        if not lines.complete:
            raise ExchangeError(
                f"the replay cannot go on: {'; '.join(lines.lacks()[:4])}. A log is missing, of a server or a worker, "
                "or what a worker does depends on more than it reads and is dealt."
            )
        return states

    def _reads(self) -> dict[int, list[int]]:
        """Return of each shard at which positions it was read."""
        reads: dict[int, list[int]] = {}
        for actions in self._actions:
            for positions in actions.pulls.values():
                for shard, position in (positions or {}).items():
                    reads.setdefault(shard, []).append(position)
        return reads

    def _work(self, work: Work, actions: Actions, lines: Lines, runner: Runner) -> None:
        compression = None if self._compression is None else self._compression()
        exchange = ReplayedExchange(self._job, actions, lines, runner, compression)
        try:
            work(actions.worker, exchange, ReplayedDealer(actions))
        finally:
            exchange.end()
