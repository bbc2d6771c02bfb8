"""From whatever moment a run with groups goes on, nothing that a group has moved is lost, and nothing counts twice."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import RecipeError
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.shard.manifest import Manifest
from paceline.exchange.shard.snapshot import Taken, load_shard, write_shard
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address
from paceline.train.rundir import RunDirectory
from paceline.train.servers.groups import cuts
from paceline.train.servers.groups.cuts import choose, keep, kept
from paceline.train.servers.groups.ledger import Ledger
from paceline.train.servers.groups.meeting import Kind, Meeting
from paceline.train.servers.groups.offline import restored, to_global, to_group
from paceline.train.servers.rundir import part_of
from tests.train.servers import test_bridge
from tests.train.servers.in_memory import Kept
from tests.train.servers.test_bridge import BEGAN, World

SGD, ASP = Rule("sgd", {"lr": 1.0}), Consistency.parse("asp")
JOB = Job(
    (DenseTable("w", (3,), "float64", SGD, ASP), SparseTable("rows", 2, "float64", SGD, ASP, Initializer("zeros"))),
    shards=2,
    pieces=2,
)
KEYS = (5, 7, 9)


class Disk:
    """The world's directories, and snapshots that are taken of it. `moved`: of each task of a group its gradient."""

    def __init__(self, folder: Path) -> None:
        part = part_of(RunDirectory(folder))
        self.world = World(part.root / "groups")
        self.above, self.groups = part.exchange(), [part.exchange(group) for group in range(2)]
        self.all = list(zip((self.world.above, *self.world.groups), (self.above, *self.groups), strict=True))
        for exchange, directory in self.all:
            directory.write(Charter(exchange.job, Terms(tasks=100), Address()))
        self.moved: list[list[float]] = [[], []]
        self._number = 0
        for which in range(3):
            self.snapshot(which)
        for directory in self.groups:
            keep(directory, directory.snapshot(0))

    def snapshot(self, which: int) -> int:
        """Write one of the global servers (0) or of a group."""
        exchange, directory = self.all[which]
        number = 0 if not list(directory.snapshots.iterdir()) else self._number
        self._number += 1
        taken = (Taken(number, shard.number, shard.state(), None) for shard in exchange.shards)
        files = {one.shard: write_shard(directory.snapshots, exchange.job, one) for one in taken}
        Manifest(number, 0, 0, 1, files).write(directory.snapshot(number))
        return number

    def move(self, group: int, by: float) -> None:
        self.world.move(group, [by, 0.0, 0.0], {KEYS[group]: by, KEYS[2]: by})
        self.moved[group].append(by)

    def keep(self, group: int) -> None:
        keep(self.groups[group], self.groups[group].snapshot(self.snapshot(1 + group)))

    def gone_on(self, folder: Path) -> tuple[World, list[float]]:
        """Go on from what is on disk; return that, and what tasks of each group have moved in it."""
        snapshot, chosen = choose(self.above, self.groups)
        made = World(folder / "made")
        last = sorted(enumerate(cut.meeting for cut in chosen), key=lambda held: held[1].number)
        changes = [to_global(meeting, group, 2) for group, meeting in last if meeting.kind is not Kind.BEGAN]
        self._read(snapshot, made.above, changes, folder / "above" / "1")
        done = []
        for group, (path, meeting) in enumerate(chosen):
            back = [to_group(meeting, group)] if meeting.kind is not Kind.BEGAN else []
            self._read(path, made.groups[group], back, folder / str(group) / "1")
            made.ledgers[group].begin(Meeting(meeting.number, meeting.number, Kind.BEGAN))
            made.born(group)
            floor = made.groups[group].shards[0].state().meta["clocks"]["floor"]
            done.append(sum(self.moved[group][:floor]))
        return made, done

    @staticmethod
    def _read(source: Path, kept_: Kept, changes: list[object], target: Path) -> None:
        restored(source, kept_.job, changes, target)  # type: ignore[arg-type]
        kept_.shards[:] = [load_shard(target, kept_.job, number) for number in range(kept_.job.shards)]


@pytest.fixture(autouse=True)
def simple(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate of 1 what tasks move is their gradients."""
    monkeypatch.setattr(test_bridge, "JOB", JOB)


def check(disk: Disk, folder: Path) -> list[float]:
    made, done = disk.gone_on(folder)
    for _ in range(6):
        made.meet(min(range(2), key=lambda group: made.ledgers[group].last().number))
    found = [float(kept.values()["w"][0]) for kept in (made.above, *made.groups)]
    rows = [float(made.row(made.above, key)[0]) for key in KEYS]
    assert found == pytest.approx([float(BEGAN["w"][0]) - sum(done) / 2] * 3)
    assert rows == pytest.approx([-done[0] / 2, -done[1] / 2, -sum(done) / 2])
    return done


@pytest.mark.parametrize("seed", range(4))
def test_whenever_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(cuts, "_KEPT", 100)  # here nobody waits for a snapshot of the global servers
    disk, chance = Disk(tmp_path), random.Random(seed)
    met = [0, 0]
    for _ in range(12):
        group = chance.randrange(2)
        disk.move(group, chance.random())
        if chance.random() < 0.6 and met[group] <= min(met) + 1:
            dies = (chance.randrange(2), chance.randrange(3)) if chance.random() < 0.3 else None
            disk.world.meet(group, dies)
            met[group] += 1
        if chance.random() < 0.3:
            disk.snapshot(chance.randrange(3))
        if chance.random() < 0.2:
            disk.keep(group)
    check(disk, tmp_path / "gone on")


def test_what_was_agreed_on_and_not_pushed_is_carried_in(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for group in range(2):
        disk.move(group, 1.0 + group)
    disk.world.meet(0)
    disk.world.born(1, [0, 1])  # the bridge dies when one of two shards has it, and all are stopped
    with pytest.raises(test_bridge.Died):
        disk.world.meet(1)
    for which in range(3):
        disk.snapshot(which)
    assert check(disk, tmp_path / "gone on") == [1.0, 2.0]
    assert [cut.meeting.number for cut in choose(disk.above, disk.groups)[1]] == [1, 1]


def test_an_old_snapshot_of_the_global_servers_goes_with_a_cut(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.move(0, 1.0)
    disk.world.meet(0)
    disk.keep(0)
    disk.snapshot(0)
    for group in (0, 1, 0):
        disk.move(group, 1.0)
        disk.world.meet(group)
    disk.snapshot(1)  # has meetings that the global snapshot has not
    assert check(disk, tmp_path / "gone on") == [1.0, 0.0]
    assert sorted(kept(disk.groups[0])) == [0, 1]


def test_snapshots_that_do_not_go_together_are_no_run_to_go_on_with(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    with pytest.raises(RecipeError, match="2 groups; go on with as many"):
        choose(disk.above, disk.groups[:1])
    ledger = Ledger(disk.groups[0].root)
    for number in (1, 2):
        ledger.begin(replace(ledger.last(), number=3 + number, kind=Kind.MET))
        keep(disk.groups[0], disk.groups[0].snapshot(0))
    with pytest.raises(RecipeError, match="go together"):
        choose(disk.above, disk.groups)
    assert torch.equal(disk.world.above.values()["w"], BEGAN["w"])
