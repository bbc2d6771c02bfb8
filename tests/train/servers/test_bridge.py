"""Bridges between the servers of groups and the global ones, on shards in memory; they die at any moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.exchange.interface import Rows
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.shard.shard import Shard
from paceline.exchange.terms import Terms
from paceline.train.servers.groups.bridge import Bridge, bridge_id
from paceline.train.servers.groups.ledger import Ledger
from paceline.train.servers.groups.meeting import Difference, Kind, Meeting, Values
from paceline.train.servers.groups.offline import Change
from paceline.train.servers.recipe.groups import global_job, global_terms, group_job, group_terms, met, trained
from paceline.train.servers.recipe.section import ServerSection
from tests.train.servers.in_memory import InMemory, Kept

RULE, ASP = Rule("adagrad", {"lr": 0.1}), Consistency.parse("asp")
JOB = Job(
    (
        DenseTable("w", (3,), "float64", RULE, ASP),
        SparseTable("rows", 2, "float64", RULE, ASP, Initializer("normal", 0.1)),
    ),
    shards=3,
    pieces=2,
)
BEGAN = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}


class Died(Exception):
    pass


class Side:
    """Servers in memory; see `bridge.Side`. dies: after how many pushes, and how many shards get the one after."""

    def __init__(self, kept: Kept, id: int, pushed: int, known: Sequence[int] = (), dies: list[int] | None = None):
        self.kept, self.job, self._id, self._sequence = kept, kept.job, id, pushed
        self.known: Sequence[int] = known or [-1] * kept.job.shards
        self.positions: Mapping[int, int] = {}
        self._dies = dies

    def changed(self, tables: Sequence[int]) -> Mapping[int, Tensor]:
        def of(shard: Shard, table: int) -> Tensor:
            return shard.changed(table, self.known[shard.number], self._id)

        found = {table: torch.cat([of(shard, table) for shard in self.kept.shards]) for table in tables}
        self.known = [shard.position for shard in self.kept.shards]
        return found

    def read(self, tables: Sequence[int], keys: Mapping[int, Tensor], clock: int) -> Values:
        exchange = InMemory(self.kept, 0)
        dense = {table: torch.empty(self.job.tables[table].shape, dtype=torch.float64) for table in tables}
        rows = {table: torch.empty(len(wanted), 2, dtype=torch.float64) for table, wanted in keys.items()}
        exchange.pull(tables, list(dense.values()), clock)
        for table, wanted in keys.items():
            exchange.pull_rows(table, wanted, rows[table], clock)
        return Values(dense, rows)

    def push(self, tasks: Sequence[int], difference: Difference) -> None:
        self._sequence += 1
        change = Change(self._id, self._sequence, tasks, difference)
        if self._dies is None:
            change.apply(self.job, self.kept.shards)
            return
        if not self._dies[0]:
            reached = [Shard.of(self.job, shard.number, shard.state()) for shard in self.kept.shards]
            change.apply(self.job, reached)
            self.kept.shards[: self._dies[1]] = reached[: self._dies[1]]
            raise Died
        self._dies[0] -= 1
        change.apply(self.job, self.kept.shards)


class World:
    """Two groups under global servers."""

    def __init__(self, folder: Path) -> None:
        self.above = Kept(global_job(JOB, 2), BEGAN)
        both = {**BEGAN, met("w"): BEGAN["w"]}
        self.groups = [Kept(group_job(JOB), both) for _ in range(2)]
        self.ledgers = [Ledger(folder / str(number)) for number in range(2)]
        for ledger in self.ledgers:
            ledger.begin(Meeting(0, 0, Kind.BEGAN))
        self.sequences = [0, 0]
        self.inside: dict[int, Side] = {}
        self.bridges: dict[int, Bridge] = {}
        for group in range(2):
            self.born(group)

    def born(self, group: int, dies: list[int] | None = None) -> None:
        last = self.ledgers[group].last()
        pushed = last.number - (last.kind is not Kind.BEGAN)
        id = bridge_id(group)
        self.inside[group] = Side(self.groups[group], id, pushed, last.inside, dies)
        above = Side(self.above, id, pushed, last.above, dies)
        self.bridges[group] = Bridge(group, 2, above, self.ledgers[group])

    def meet(self, group: int, dies: tuple[int, int] | None = None) -> None:
        if dies is None:
            self.bridges[group].meet(self.inside[group])
            return
        self.born(group, list(dies))
        with pytest.raises(Died):
            self.meet(group)
        self.born(group)
        self.bridges[group].settle(self.inside[group])

    def move(self, group: int, w: list[float], rows: dict[int, float] | None = None) -> None:
        """Move a group's parameters by tasks of its workers."""
        self.sequences[group] += 1
        sequence = self.sequences[group]
        keys = torch.tensor(list(rows or {}), dtype=torch.int64)
        values = torch.tensor([[value, 1.0] for value in (rows or {}).values()], dtype=torch.float64)
        gradient = {0: torch.tensor(w, dtype=torch.float64)}
        difference = Difference(gradient, {1: Rows(keys, values)} if rows else {})
        Change(1, sequence, (sequence - 1,), difference).apply(self.groups[group].job, self.groups[group].shards)

    def row(self, kept: Kept, key: int, table: int = 1) -> Tensor:
        out = torch.empty(1, 2, dtype=torch.float64)
        InMemory(kept, 0).pull_rows(table, torch.tensor([key]), out, 0)
        return out[0]


def script(world: World, dies: tuple[int, int] | None = None) -> None:
    world.move(0, [1.0, 0.0, 2.0], {5: 1.0, 7: 2.0})
    world.move(1, [0.0, 4.0, 0.0], {7: 3.0, 9: 1.0})
    world.meet(0)
    world.meet(1)
    world.move(0, [1.0, 1.0, 1.0], {7: 1.0, 11: 0.5})
    world.meet(0, dies)
    world.move(0, [0.5, 0.0, 0.0], {5: 1.0})
    world.meet(1)
    world.meet(0)
    world.meet(1)


def test_what_groups_move_is_averaged_and_comes_back_to_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    began = {key: world.row(world.above, key).clone() for key in (5, 7, 9)}
    script(world)
    ends = [kept.values()["w"] for kept in (world.above, *world.groups)]
    assert torch.allclose(ends[0], ends[1], atol=1e-12) and torch.allclose(ends[0], ends[2], atol=1e-12)
    # Adagrad's first step is the rate, whatever the gradient; it counts half.
    assert float(ends[2][1]) == pytest.approx(2.0 - 0.05 - 0.05)
    for key in (5, 7, 9, 11):
        rows = [world.row(kept, key) for kept in (world.above, *world.groups)]
        assert torch.allclose(rows[0], rows[1], atol=1e-12) and torch.allclose(rows[0], rows[2], atol=1e-12)
    assert world.row(world.above, 9).tolist() == pytest.approx((began[9] - 0.05).tolist())
    assert float(world.row(world.above, 5)[0]) == pytest.approx(float(began[5][0]) - 0.05 - 0.05 / 2**0.5)


def test_rows_that_nobody_has_changed_are_not_carried_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    script(world)
    world.meet(0)
    world.meet(1)
    for group in range(2):
        last = world.ledgers[group].last()
        assert last.number == 4 and not last.moved.rows


@pytest.mark.parametrize("push", [0, 1], ids=["above", "inside"])
@pytest.mark.parametrize("shards", [0, 1, 2])
def test_a_bridge_that_dies_in_a_push_is_followed_by_one_that_goes_on(tmp_path: Path, push: int, shards: int) -> None:
    expected, world = World(tmp_path / "expected"), World(tmp_path / "world")
    script(expected)
    script(world, (push, shards))
    for one, other in zip((expected.above, *expected.groups), (world.above, *world.groups), strict=True):
        assert torch.equal(one.values()["w"], other.values()["w"])
        for key in (5, 7, 9, 11):
            assert torch.equal(expected.row(one, key), world.row(other, key))
    assert [note.number for note in world.ledgers[0].notes()] == [1, 2, 3]


def test_one_that_dies_before_it_has_agreed_meets_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    world.move(0, [1.0, 0.0, 0.0], {5: 1.0})
    with monkeypatch.context() as patch:
        patch.setattr(Meeting, "write", lambda *_: (_ for _ in ()).throw(Died()))
        with pytest.raises(Died):
            world.meet(0)
    world.born(0)
    world.bridges[0].settle(world.inside[0])
    world.move(0, [1.0, 0.0, 0.0])
    world.meet(0)
    (note,) = world.ledgers[0].notes()  # of two, the later one
    assert note.number == 1 and note.met[1].keys.tolist() == [5] and note.met[1].own.all()
    moved = (0.1 + 0.1 / 2**0.5) / 2  # two steps of Adagrad, by half
    assert world.above.values()["w"].tolist() == pytest.approx([1.0 - moved, 2.0, 3.0])
    assert torch.allclose(world.above.values()["w"], world.groups[0].values()["w"], atol=1e-12)


def test_a_group_that_has_ended_lets_others_pass(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.move(0, [1.0, 0.0, 0.0])
    world.meet(0)
    world.bridges[0].settle(None)  # once more, as it ends in the middle of it
    world.bridges[0].pass_over()
    assert [shard.position for shard in world.above.shards] == [2, 2, 2]
    world.born(0)
    world.bridges[0].settle(None)
    assert world.ledgers[0].last().kind is Kind.NOTHING
    world.meet(1)
    world.meet(1)
    assert all(shard.completed == 2 for shard in world.above.shards)


def test_meetings_of_a_run() -> None:
    server = ServerSection(deployment="groups", workers=4, groups=2, sync_every=10)
    terms = Terms(tasks=50, snapshot_every=12)  # 25 steps in each group: after 10, 20 and at the end
    above = global_terms(server, terms, JOB)
    assert (above.tasks, above.workers, above.snapshot_every) == (6, 2, 2)
    assert group_terms(server, terms).snapshot_every == 20
    assert trained(group_job(JOB)).tables == JOB.tables
