"""Whoever comes and goes: one master of every shard, copies only where they were made, few moves, and even loads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.exchange.job import Job
from paceline.exchange.membership import ring
from paceline.exchange.membership.views import begun, lost, may_go, next_view
from paceline.exchange.view import Address, Move, Turn, View


def servers(ids: Iterable[int], machines: int = 0) -> dict[int, Address]:
    return {one: Address("127.0.0.1", 1, machine=f"machine {one % machines}" if machines else "") for one in ids}


@dataclass
class World:
    """Servers that come and go, and the views made of them. Every view is held against the one before."""

    job: Job
    alive: set[int]
    leaving: set[int] = field(default_factory=set)
    born: int = 100
    copies: int = 0
    machines: int = 0

    def __post_init__(self) -> None:
        self.view = begun(View(), servers(self.alive, self.machines), self.job)

    def step(self, synced: Sequence[Move] = (), turned: Sequence[Turn] = ()) -> None:
        before = self.view
        there = servers(self.alive, self.machines)
        view = next_view(before, there, self.job, leaving=self.leaving, synced=synced, turned=turned)
        assert view.epoch == before.epoch + (view != before)
        assert set(view.servers) == self.alive
        staying = self.alive - self.leaving
        length = min(self.job.replication, len(staying))
        for shard, (old, new) in enumerate(zip(before.chains, view.chains, strict=True)):
            grown = [move.target for move in before.moves if move.shard == shard and move in synced]
            whole = [server for server in (*old, *grown) if server in self.alive]
            assert len(set(new)) == len(new)
            if any(turn.shard == shard for turn in turned) and new != old:
                whole = [*whole[1:], *whole[:1]] if set(new) == set(old) else whole
            assert list(new) == [server for server in whole if server in new]  # in order, and only who has a copy
            assert bool(new) == bool(whole)
            if set(new) != set(whole):  # somebody was let go, so enough of those who stay have it
                assert len(staying.intersection(new)) >= length
        moving = Counter([move.shard for move in view.moves] + [turn.shard for turn in view.turns])
        assert all(turn.head == view.head(turn.shard) for turn in view.turns)
        assert not moving or max(moving.values()) == 1
        for shard, source, target, _ in view.moves:
            assert source == view.tail(shard)
            assert target in staying and target not in view.chains[shard]
        self.copies += len(set(view.moves) - set(before.moves))
        self.view = view

    def settle(self) -> int:
        """Finish all moves, one view after the other, until there are none; return how many copies were made."""
        before = self.copies
        self.step()
        for _ in range(1000):
            if not (self.view.moves or self.view.turns):
                break
            self.step(self.view.moves, self.view.turns)
        assert not self.view.moves and not self.view.turns
        return self.copies - before


def spread(view: View, staying: Iterable[int]) -> tuple[list[int], list[int]]:
    heads = Counter(chain[0] for chain in view.chains)
    held = Counter(server for chain in view.chains for server in chain)
    return [heads[one] for one in staying], [held[one] for one in staying]


@pytest.mark.parametrize("replication", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_job_begins_even_and_at_rest(count: int, replication: int) -> None:
    world = World(Job((), 32, replication=replication), set(range(count)))
    assert world.view.epoch == world.view.first == 1
    heads, held = spread(world.view, range(count))
    assert max(heads) - min(heads) <= 2
    assert max(held) - min(held) <= 3
    assert {len(chain) for chain in world.view.chains} == {min(count, replication)}
    assert world.settle() == 0


@pytest.mark.parametrize("replication", [1, 2, 3])
@pytest.mark.parametrize("count", [3, 4, 6])
def test_one_more_server_takes_its_part_with_few_copies(count: int, replication: int) -> None:
    world = World(Job((), 48, replication=replication), set(range(count)))
    world.alive.add(count)
    copies = world.settle()
    heads, held = spread(world.view, world.alive)
    share = 48 * replication / (count + 1)
    assert max(heads) - min(heads) <= 3
    assert max(held) - min(held) <= 4
    assert copies <= (1 + replication / 2) * share  # heads are handed on by copies at the other end of their chains
    if replication == 1:
        assert copies <= math.ceil(share)


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_a_server_that_leaves_keeps_its_shards_until_others_have_them(replication: int) -> None:
    world = World(Job((), 24, replication=replication), {1, 2, 3, 4})
    world.leaving.add(2)
    world.step()
    assert not may_go(world.view, 2)
    held = sum(2 in chain for chain in world.view.chains)
    copies = world.settle()
    assert may_go(world.view, 2)
    assert {len(chain) for chain in world.view.chains} == {replication}
    assert copies <= 2 * held


def test_the_last_server_cannot_leave_before_another_comes() -> None:
    world = World(Job((), 8, replication=2), {1})
    world.leaving.add(1)
    assert world.settle() == 0
    assert not may_go(world.view, 1)
    world.alive.add(2)
    assert world.settle() == 8
    assert may_go(world.view, 1)


def test_a_finished_copy_counts_even_if_its_source_is_gone() -> None:
    world = World(Job((), 1, replication=1), {1})
    world.alive.add(2)
    world.leaving.add(1)
    world.step()
    (move,) = world.view.moves
    world.alive.remove(1)
    world.step([move])
    assert world.view.chains == ((2,),)


def test_a_copy_in_the_making_does_not_count() -> None:
    world = World(Job((), 1, replication=1), {1})
    world.alive.add(2)
    world.leaving.add(1)
    world.step()
    world.alive.remove(1)
    world.step()
    assert lost(world.view) == (0,)
    assert not world.view.moves


def test_heads_are_evened_after_servers_came_one_by_one() -> None:
    world = World(Job((), 16, replication=3), {0})
    for event in ("join", "join", "die", "join", "join"):
        if event == "join":
            world.born += 1
            world.alive.add(world.born)
        else:
            world.alive.remove(101)
        world.step()
    world.settle()
    heads, held = spread(world.view, world.alive)
    assert max(heads) <= 5  # of 16 on four servers; it was 7
    assert max(held) - min(held) <= 2


@pytest.mark.parametrize(("machines", "replication"), [(2, 2), (3, 2), (3, 3)])
def test_a_machine_that_is_lost_takes_one_copy_of_each_shard_at_most(machines: int, replication: int) -> None:
    world = World(Job((), 16, replication=replication), set(range(2 * machines)), machines=machines)
    for _ in range(2):
        for chain in world.view.chains:
            assert len({server % machines for server in chain}) == replication
        world.alive -= {server for server in world.alive if server % machines == 0}  # all of one machine at once
        world.step()
        assert not lost(world.view)
        world.settle()
        world.alive |= {100 * machines, 101 * machines}  # it is back
        world.settle()


@pytest.mark.parametrize("count", [2, 3])
def test_heads_are_even_where_all_servers_have_all_shards(count: int) -> None:
    world = World(Job((), 12, replication=count), {0})
    for server in range(1, count):
        world.alive.add(server)
        copies = world.settle()
        assert copies == 12
    heads, held = spread(world.view, world.alive)
    assert heads == [12 // count] * count and held == [12] * count


def test_a_head_whose_chain_changes_does_not_turn() -> None:
    world = World(Job((), 4, replication=2), {0})
    world.alive.add(1)
    while not world.view.turns:
        world.step(world.view.moves)
    turns = world.view.turns
    assert [turn.head for turn in turns] == [0] * len(turns)
    world.alive.add(2)
    world.leaving.add(1)
    world.step()
    assert not world.view.turns
    world.step((), turns)  # they were ready before they heard
    assert world.view.head(turns[0].shard) == 0


@pytest.mark.parametrize("replication", [2, 3])
def test_servers_that_do_not_reach_each_other_hand_nothing_to_each_other(replication: int) -> None:
    of, there = Job((), 24, replication=replication), servers(range(5))
    view = begun(View(), there, of)
    parted = [frozenset((0, 1)), frozenset((0, 2)), frozenset((3, 4))]
    for known in range(1, 4):
        while True:
            after = next_view(view, there, of, synced=view.moves, parted=parted[:known])
            links = [frozenset(pair) for chain in after.chains for pair in pairwise(chain)]
            links += [frozenset((move.source, move.target)) for move in after.moves]
            assert not set(links) & set(parted[:known])
            for before, now in zip(view.chains, after.chains, strict=True):
                assert set(now) & set(before)
            if after == view:
                break
            view = after
        assert {len(chain) for chain in view.chains} == {replication}
        heads, _ = spread(view, there)
        assert max(heads) <= 8


def test_a_server_that_reaches_nobody_holds_nothing() -> None:
    of, there = Job((), 12, replication=2), servers(range(4))
    view = begun(View(), there, of)
    parted = [frozenset((0, other)) for other in (1, 2, 3)]
    for known in (2, 3):  # the first may be anybody's fault
        view = next_view(view, there, of, parted=parted[:known])
        while view.moves:
            view = next_view(view, there, of, synced=view.moves, parted=parted[:known])
    assert all(0 not in chain or chain == (0,) for chain in view.chains)


EVENTS = st.tuples(st.sampled_from(["join", "die", "leave", "sync", "sync", "look"]), st.integers(0, 1 << 16))


@settings(max_examples=120)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([0, 0, 2, 3]),
    st.lists(EVENTS, max_size=30),
)
def test_whoever_comes_and_goes(
    shards: int, count: int, replication: int, machines: int, events: list[tuple[str, int]]
) -> None:
    world = World(Job((), shards * 4, replication=replication), set(range(count)), machines=machines)
    for event, draw in events:
        synced: list[Move] = []
        turned: list[Turn] = []
        if event == "join":
            world.born += 1
            world.alive.add(world.born)
        elif event == "die" and world.alive:
            gone = sorted(world.alive)[draw % len(world.alive)]
            world.alive.discard(gone)
            world.leaving.discard(gone)
        elif event == "leave" and world.alive:
            world.leaving.add(sorted(world.alive)[draw % len(world.alive)])
        elif event == "sync":
            synced = [move for i, move in enumerate(world.view.moves) if draw >> i & 1]
            turned = [turn for i, turn in enumerate(world.view.turns) if draw >> i & 1]
        world.step(synced, turned)
        for server in [one for one in world.leaving if may_go(world.view, one)]:
            world.alive.discard(server)
            world.leaving.discard(server)
    world.settle()
    staying = world.alive - world.leaving
    if staying:
        there = [chain for chain in world.view.chains if chain]
        assert all(len(chain) == min(replication, len(staying)) for chain in there)
        assert all(may_go(world.view, server) for server in world.leaving)
        if not machines:
            heads = Counter(chain[0] for chain in there)
            assert max((heads[one] for one in staying), default=0) <= math.ceil(len(there) / len(staying)) + 2


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 64), st.integers(1, 4))
def test_nobody_is_given_more_than_the_mean(count: int, shards: int, replication: int) -> None:
    made = ring.chains(range(count), shards, replication)
    assert max(Counter(chain[0] for chain in made).values()) <= math.ceil(shards / count)
    assert all(len(set(chain)) == min(count, replication) for chain in made)


def test_a_ring_changes_little_when_a_server_comes() -> None:
    before = [ring.preferences((1, 2, 3, 4), shard)[0] for shard in range(400)]
    after = [ring.preferences((1, 2, 3, 4, 5), shard)[0] for shard in range(400)]
    assert all(new in (old, 5) for old, new in zip(before, after, strict=True))
    assert 0 < after.count(5) < 160
