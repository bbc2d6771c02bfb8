"""The replay of a run with groups: all of its exchanges at once, with the bridges between them.

Where a bridge read, and which rows, is in the notes of its group (`ledger`); the rest it computes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.exchange.client.actions import Actions
from paceline.exchange.client.outgoing import Compressor
from paceline.exchange.directory import Directory
from paceline.exchange.job import Job
from paceline.exchange.replay.baton import Runner
from paceline.exchange.replay.exchange import ReplayedExchange
from paceline.exchange.replay.replay import Work, together
from paceline.exchange.replay.whole import Outcome, Rerun
from paceline.exchange.shard.shard import Shard
from paceline.exchange.shard.whole import gather
from paceline.train.servers.groups.bridge import Bridge, bridge_id, task_of
from paceline.train.servers.groups.ledger import Ledger, Note
from paceline.train.servers.groups.meeting import Difference, Kind, Meeting, Met, Values
from paceline.train.servers.groups.offline import held, to_group
from paceline.train.servers.groups.side import push_with, read_with


def replay_groups(
    above: Directory,
    groups: Sequence[Directory],
    work: Callable[[int], Work],
    compression: Callable[[int], Callable[[], Compressor] | None],
) -> Outcome:
    """Run all exchanges of a run once more and compare what comes out with the last snapshot of each.

    Args:
        above: directory of the global servers' exchange.
        groups: those of the groups.
        work: returns the loop of a group's workers, as they ran it.
        compression: returns what makes for a worker of a group what its gradients went through.

    Raises:
        ExchangeError: there is nothing to compare with, logs are missing, or somebody did something else this time.
    """
    began = time.monotonic()
    bridges = [_Replayed(Ledger(directory.root), group, len(groups)) for group, directory in enumerate(groups)]
    over = Rerun(above, others=[bridge.above for bridge in bridges])
    inside = [
        Rerun(directory, compression=compression(group), others=[bridges[group].inside])
        for group, directory in enumerate(groups)
    ]
    runners = [runner for group, rerun in enumerate(inside) for runner in rerun.replay.runners(work(group))]
    runners += [
        Runner(f"the bridge of group {group}", partial(bridge.run, over, inside[group]))
        for group, bridge in enumerate(bridges)
    ]
    everything = [over, *inside]
    together([rerun.replay for rerun in everything], runners)
    first = next((one for rerun in everything if (one := rerun.difference) is not None), None)
    updates, workers = (sum(getattr(rerun, name) for rerun in everything) for name in ("updates", "workers"))
    return Outcome(over.snapshot, updates, workers, first, time.monotonic() - began)


class _Replayed:
    """A bridge, and what it did on both sides as `client.actions` has it.

    Args:
        ledger: of its group.
        group: its number.
        groups: how many there are.
    """

    def __init__(self, ledger: Ledger, group: int, groups: int) -> None:
        self._ledger, self._group, self._groups = ledger, group, groups
        self._notes = ledger.notes()
        self._base = ledger.last().base
        self.above, self.inside = Actions(bridge_id(group)), Actions(bridge_id(group))
        for note in self._notes:
            self.above.pushes[note.number] = (task_of(note.number, group, groups),)
            if note.kind is not Kind.NOTHING:
                self.above.pulls[len(self.above.pulls) + 1] = note.above
            if note.kind is Kind.MET:
                self.inside.pushes[note.number] = ()
                self.inside.pulls[len(self.inside.pulls) + 1] = note.inside

    def run(self, over: Rerun, group: Rerun, runner: Runner) -> None:
        """Meet as it did."""
        above = _Side(over.replay.exchange(self.above, runner, self._base), own=False)
        inside = _Side(group.replay.exchange(self.inside, runner, self._base), own=True)
        bridge = Bridge(self._group, self._groups, above, _Unwritten(self._base))
        try:
            for note in self._notes:
                above.met = inside.met = note.met
                if note.kind is Kind.MET:
                    bridge.meet(inside)
                elif note.kind is Kind.LAST:
                    runner.wait(lambda: group.replay.complete)
                    bridge.meet_last(*self._end(group, bridge.last))
                else:
                    bridge.pass_over()
        finally:
            for side in (above, inside):
                side.exchange.end()

    def _end(self, group: Rerun, last: Meeting) -> tuple[Values, Mapping[int, Met]]:
        """What the group held at its end, with its last meeting; see `cuts.end_of`."""
        job = group.job
        shards = [Shard.of(job, number, group.replay.states[number]) for number in range(job.shards)]
        if last.kind is Kind.MET:
            to_group(last, self._group).apply(job, shards)
        return held(gather(job, shards), job)


class _Unwritten(Ledger):
    """A ledger that begins as another did, and keeps nothing."""

    def __init__(self, base: int) -> None:
        self._base = base

    def last(self) -> Meeting:
        """See `Ledger`."""
        return Meeting(self._base, self._base, Kind.BEGAN)

    def agree(self, meeting: Meeting, note: Note) -> None:
        """See `Ledger`."""


class _Side:
    """A side of a replayed bridge; see `bridge.Side`.

    Args:
        exchange: with its shards.
        own: whether it is that of the group.

    Attributes:
        met: the rows of the meeting in progress.
    """

    def __init__(self, exchange: ReplayedExchange, *, own: bool) -> None:
        self.exchange, self._own = exchange, own
        self.met: Mapping[int, Met] = {}
        self.positions: Mapping[int, int] = {}
        self.known: Sequence[int] = ()

    @property
    def job(self) -> Job:
        """See `bridge.Side`."""
        return self.exchange.job

    def changed(self, tables: Sequence[int]) -> Mapping[int, Tensor]:
        """See `bridge.Side`: as it was noted."""
        noted = {table: self.met[table] for table in tables}
        return {table: met.keys[met.own if self._own else torch.logical_not(met.own)] for table, met in noted.items()}

    def read(self, tables: Sequence[int], keys: Mapping[int, Tensor], clock: int) -> Values:
        """See `bridge.Side`."""
        return read_with(self.exchange, tables, keys, clock)

    def push(self, tasks: Sequence[int], difference: Difference) -> None:
        """See `bridge.Side`."""
        push_with(self.exchange, tasks, difference)
