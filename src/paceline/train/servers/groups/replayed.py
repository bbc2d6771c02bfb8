"""The replay of a run with groups: all of its exchanges at once, with the bridges between them.

Where a bridge read, and which rows, is in the notes of its group (`ledger`); the rest it computes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
from paceline.train.servers.groups.offline import Change, held, to_global, to_group
from paceline.train.servers.groups.side import push_with, read_with


class Exchanges(NamedTuple):
    """The directories of all exchanges of a part of a run: of the global servers, and of the groups."""

    above: Directory
    groups: Sequence[Directory]


def replay_groups(
    part: Exchanges,
    follows: Exchanges | None,
    work: Callable[[int], Work],
    compression: Callable[[int], Callable[[], Compressor] | None],
) -> Outcome:
    """Run all exchanges of a run once more and compare what comes out with the last snapshot of each.

    Args:
        part: what is run.
        follows: what went on from it: what that began with is what is to come out.
        work: returns the loop of a group's workers, as they ran it.
        compression: returns what makes for a worker of a group what its gradients went through.

    Raises:
        ExchangeError: there is nothing to compare with, logs are missing, or somebody did something else this time.
    """
    began = time.monotonic()
    above, groups = part
    nexts: Sequence[Directory | None] = [None] * len(groups) if follows is None else follows.groups
    bridges = [
        _Replayed(Ledger(directory.root), group, len(groups), None if after is None else _base(after))
        for group, (directory, after) in enumerate(zip(groups, nexts, strict=True))
    ]
    after = None if follows is None else follows.above
    over = Rerun(above, snapshot=_left_at(above, after), follows=after, others=[bridge.above for bridge in bridges])
    inside = [
        Rerun(
            directory,
            snapshot=_left_at(directory, after),
            follows=after,
            compression=compression(group),
            others=[bridges[group].inside],
        )
        for group, (directory, after) in enumerate(zip(groups, nexts, strict=True))
    ]
    runners = [runner for group, rerun in enumerate(inside) for runner in rerun.replay.runners(work(group))]
    runners += [
        Runner(f"the bridge of group {group}", partial(bridge.run, over, inside[group]))
        for group, bridge in enumerate(bridges)
    ]
    everything = [over, *inside]
    together(
        [rerun.replay for rerun in everything], runners, lambda: [bridge.lack for bridge in bridges if bridge.lack]
    )
    carried = sorted((meeting.number, group, meeting) for group, b in enumerate(bridges) for meeting in b.carried[-1:])
    differences = [over.difference(_applied(over.job, [to_global(m, g, len(groups)) for _, g, m in carried]))]
    for group, (rerun, bridge) in enumerate(zip(inside, bridges, strict=True)):
        differences.append(rerun.difference(_applied(rerun.job, [to_group(m, group) for m in bridge.carried])))
    first = next((one for one in differences if one is not None), None)
    updates, workers = (sum(getattr(rerun, name) for rerun in everything) for name in ("updates", "workers"))
    return Outcome(over.snapshot, updates, workers, first, time.monotonic() - began)


def _applied(job: Job, changes: Sequence[Change]) -> Callable[[Sequence[Shard]], None]:
    """Return what applies changes to shards that lack them, as they were when the run went on (`offline`)."""

    def apply(shards: Sequence[Shard]) -> None:
        for change in changes:
            change.apply(job, shards)

    return apply


def _base(group: Directory) -> int:
    """Return with which meeting a group began."""
    return Ledger(group.root).last().base


def _left_at(directory: Directory, follows: Directory | None) -> Path | None:
    """Return the snapshot of an exchange that another went on from, which may be one that a group kept (`cuts`)."""
    if follows is None:
        return None
    number = follows.read().terms.restored
    places = [directory.snapshot(number), *directory.root.glob(f"cuts/*/{number}")]
    return next((place for place in places if place.is_dir()), places[0])


class _Replayed:
    """A bridge, and what it did on both sides as `client.actions` has it.

    Args:
        ledger: of its group.
        group: its number.
        groups: how many there are.
        last: the number of its last meeting that what came after began with; None: nothing came after.

    Attributes:
        carried: meetings up to that one which a snapshot may lack, each carried out once where it does.
    """

    def __init__(self, ledger: Ledger, group: int, groups: int, last: int | None) -> None:
        self._group, self._groups, self._last = group, groups, last
        self.carried: list[Meeting] = []
        self._notes = ledger.notes()
        self._base = self._number = ledger.last().base
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
                    runner.wait(lambda: group.replay.lines.ended)
                    bridge.meet_last(*self._end(group, bridge.last))
                else:
                    bridge.pass_over()
                self._met(bridge.last)
        finally:
            for side in (above, inside):
                side.exchange.end()

    @property
    def lack(self) -> str:
        """What it has yet to come to; empty: nothing."""
        last = self._last or 0
        return f"group {self._group} is at meeting {self._number} of {last}" if self._number < last else ""

    def _met(self, meeting: Meeting) -> None:
        self._number = meeting.number
        if self._last is not None and meeting.number <= self._last:
            self.carried = [held for held in self.carried if held.kind is Kind.MET and meeting.kind is not Kind.MET]
            self.carried.append(meeting)

    def _end(self, group: Rerun, last: Meeting) -> tuple[Values, Mapping[int, Met]]:
        """What the group held at its end, with its last meeting; see `cuts.end_of`."""
        job = group.job
        shards = [Shard.of(job, number, group.replay.lines[number].shard.state()) for number in range(job.shards)]
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
