"""What the coordinator decides, without processes and at times that the test sets."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.exchange.directory import Directory
from paceline.exchange.job import Job
from paceline.exchange.membership import books
from paceline.exchange.membership.books import Books
from paceline.exchange.membership.coordinator import Coordinator
from paceline.exchange.membership.partitions import AGAIN_S
from paceline.exchange.membership.protocol import Message
from paceline.exchange.membership.seats import Process
from paceline.exchange.membership.state import State, listed
from paceline.exchange.membership.store import Record
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address
from tests.exchange.membership.village import job

LEASE_S = 2.0


class Memory:
    """A store that survives its coordinator."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    @property
    def appended(self) -> int:
        return len(self.records)

    def load(self) -> list[Record]:
        return json.loads(json.dumps(self.records))

    def append(self, records: Sequence[Record], durable: bool) -> None:
        self.records += records

    def replace(self, record: Record) -> None:
        self.records = [record]

    def close(self) -> None: ...


class Peer:
    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        self.heard.append(json.loads(json.dumps(message)))

    def close(self) -> None:
        self.closed = True

    def answer(self, number: int) -> Message:
        return next(message for message in self.heard if message.get("answer") == number)


class Desk:
    """A coordinator, its store, and members that say what the test has them say."""

    def __init__(self, folder: Path, job: Job, terms: Terms, store: Memory | None = None, now_s: float = 0.0) -> None:
        self.charter = Charter(job, terms, Address(unix="nowhere"))
        self.directory = Directory(folder)
        self.store = store or Memory()
        self.now_s = now_s
        self.books = Books(self.charter, self.store, folder / "events.jsonl")
        self.coordinator = Coordinator(self.charter, self.directory, self.books, lambda *_: None, now_s)

    @property
    def state(self) -> State:
        return self.books.state

    def join(self, nonce: str, role: str = "worker", **more: Any) -> Peer:
        peer = Peer()
        who = {"role": role, "nonce": nonce, "process": asdict(Process()), "address": asdict(Address())}
        self.coordinator.hear(peer, {"say": "join", "n": 0, **who, "id": None, "holding": [], **more}, self.now_s)
        self.settle()
        return peer

    def say(self, peer: Peer, what: str, n: int = 1, **more: Any) -> Peer:
        self.coordinator.hear(peer, {"say": what, "n": n, **more}, self.now_s)
        self.settle()
        return peer

    def settle(self) -> None:
        self.coordinator.settle(self.now_s)
        self.books.commit()

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.settle()

    def again(self) -> Desk:
        """The coordinator is killed, and another one started."""
        return Desk(self.directory.root, self.charter.job, self.charter.terms, self.store, self.now_s)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, job(), Terms(9, lease_s=LEASE_S, ahead=2))


def test_who_did_not_hear_its_number_gets_the_same_again(desk: Desk) -> None:
    first = desk.join("a").answer(0)["id"]
    assert desk.join("a").answer(0)["id"] == first
    assert desk.again().join("a").answer(0)["id"] == first


def test_who_is_unknown_and_has_a_number_is_fenced(desk: Desk) -> None:
    assert "fenced" in desk.join("a", id=7).answer(0)


def test_who_was_gone_stays_gone_also_to_the_next_coordinator(desk: Desk) -> None:
    peer = desk.join("a")
    desk.pass_s(LEASE_S + 0.1)
    assert "silent" in peer.heard[-1]["fenced"] and peer.closed
    assert "silent" in desk.again().join("a").answer(0)["fenced"]


def test_a_task_whose_answer_was_lost_goes_to_somebody(desk: Desk) -> None:
    desk.join("s", "server")
    worker = desk.join("w")
    desk.say(worker, "next")
    assert worker.answer(1)["deal"] == ["task", 0, False]
    after = desk.again()
    back = after.join("w", holding=[])
    after.say(back, "next", 2)
    assert back.answer(2)["deal"] == ["task", 0, True]


def test_a_coordinator_that_was_away_accuses_nobody(desk: Desk) -> None:
    desk.join("w")
    desk.now_s += 100
    desk.coordinator.away(desk.now_s)
    desk.settle()
    assert len(desk.state.seats) == 1
    after = desk.again()
    after.pass_s(LEASE_S - 0.1)
    assert len(after.state.seats) == 1
    after.pass_s(0.2)
    assert not after.state.seats


def test_a_question_for_work_waits_a_moment(desk: Desk) -> None:
    worker = desk.join("w")
    desk.say(worker, "next")
    desk.pass_s(0.1)
    assert not any("deal" in message for message in worker.heard)
    desk.join("s", "server")
    assert worker.answer(1)["deal"] == ["task", 0, False]
    desk.say(worker, "next", 2)
    desk.say(worker, "next", 3)
    assert worker.answer(3)["deal"] == ["wait", -1, False]  # it has what it may hold: at once


def test_what_a_malformed_message_says_changes_nothing(desk: Desk) -> None:
    worker = desk.join("w")
    with pytest.raises(KeyError):
        desk.say(worker, "done")
    assert not desk.state.tasks.counts()["done"]


def test_the_last_figures_of_who_left_are_told_for_a_while_and_of_who_was_killed_not(desk: Desk) -> None:
    one, two, three = (desk.join(nonce) for nonce in "abc")
    desk.say(one, "beat", figures={"tasks": 1})
    desk.say(one, "leave", 2, figures={"tasks": 2})
    desk.say(two, "beat", figures={"tasks": 3})
    desk.say(two, "leave", 2, figures=None)
    desk.say(three, "close")
    found = [{"id": id, "role": "worker", "figures": {"tasks": tasks}} for id, tasks in ((1, 2), (2, 3))]
    assert desk.coordinator.status()["left"] == found
    desk.pass_s(61.0)
    assert desk.coordinator.status()["left"] == []


def test_a_copy_reported_for_an_earlier_move_does_not_count(desk: Desk) -> None:
    first = desk.join("s", "server")
    desk.join("t", "server")
    (move, *_) = desk.state.view.moves
    desk.say(first, "synced", shard=move.shard, target=move.target, begun=move.begun - 1)
    assert move in desk.state.view.moves
    desk.say(first, "synced", shard=move.shard, target=move.target, begun=move.begun)
    assert move not in desk.state.view.moves
    assert desk.state.view.chains[move.shard] == (move.target,)


def test_a_snapshot_is_asked_of_new_tails_when_old_ones_are_gone(tmp_path: Path) -> None:
    desk = Desk(tmp_path, job(shards=2, replication=2), Terms(2, servers=2, lease_s=LEASE_S, snapshot_every=1))
    one, two, worker = desk.join("s", "server"), desk.join("t", "server"), desk.join("w")
    desk.say(worker, "done", items=[["task", 0]])
    asked = {shard for peer in (one, two) for m in peer.heard if m.get("tell") == "snapshot" for shard in m["shards"]}
    assert asked == {0, 1}
    desk.say(two, "close")
    shards = [message["shards"] for message in one.heard if message.get("tell") == "snapshot"]
    assert sorted(shard for some in shards for shard in some) == [0, 1]
    for shard in (0, 1):
        desk.say(one, "file", number=1, shard=shard, name=f"{shard}.json")
    assert desk.state.snapshots[-1].files == {0: "0.json", 1: "1.json"}


def test_where_memory_outlives_its_keeper_the_job_waits_for_another(tmp_path: Path) -> None:
    desk = Desk(tmp_path, job(shards=1), Terms(9, lease_s=1e9, outlived=True))
    first, worker = desk.join("s", "server"), desk.join("w")
    desk.say(worker, "next")
    desk.say(first, "close")
    desk.say(worker, "done", 2, items=[["task", 0]])
    desk.say(worker, "next", 3)
    desk = desk.again()
    assert not desk.state.failed and desk.coordinator.status()["state"] == "waiting"
    worker = desk.join("w", id=2)
    desk.say(worker, "next", 4)
    desk.join("t", "server")
    assert worker.answer(4)["deal"] == ["task", 1, False]
    assert desk.state.view.chains == ((3,),)


def test_servers_that_do_not_reach_each_other_get_a_view_without_that(tmp_path: Path) -> None:
    desk = Desk(tmp_path, job(shards=6, replication=2), Terms(9, servers=3, lease_s=1e9))
    peers = {id: desk.join(f"s{id}", "server") for id in (1, 2, 3)}
    one, other = desk.state.view.chains[0]
    desk.say(peers[other], "unreached", server=one + 7)  # nobody
    assert desk.state.view.epoch == 3
    desk.say(peers[one], "unreached", server=other)
    assert desk.state.view.epoch == 4
    third = 6 - one - other

    def settle() -> None:
        for _ in range(20):
            for move in desk.state.view.moves:
                desk.say(peers[move.source], "synced", shard=move.shard, target=move.target, begun=move.begun)

    settle()
    assert all(third in chain and len(chain) == 2 for chain in desk.state.view.chains)
    assert any(line for line in (tmp_path / "events.jsonl").read_text().splitlines() if '"unreached"' in line)
    desk.pass_s(AGAIN_S + 1)  # maybe they do by now
    settle()
    assert any(set(chain) == {one, other} for chain in desk.state.view.chains)


def test_heads_turn_once_they_say_that_they_may(tmp_path: Path) -> None:
    desk = Desk(tmp_path, job(replication=2), Terms(9, lease_s=1e9))
    first, _ = desk.join("s", "server"), desk.join("t", "server")
    for move in desk.state.view.moves:
        desk.say(first, "synced", shard=move.shard, target=move.target, begun=move.begun)
    assert desk.state.view.chains == ((1, 2),) * 4
    one, other = desk.state.view.turns
    desk.say(first, "turned", shard=one.shard, begun=one.begun - 1)  # an earlier one
    assert desk.state.view.turns == (one, other)
    desk = desk.again()
    first, second = desk.join("s", "server", id=1), desk.join("t", "server", id=2)
    desk.say(second, "turned", shard=one.shard, begun=one.begun)  # of which it is not the head
    desk.say(first, "turned", shard=one.shard, begun=one.begun)
    assert desk.state.view.turns == (other,) and desk.state.view.chains[one.shard] == (2, 1)
    desk.say(second, "close")
    assert not desk.state.view.turns and desk.state.view.chains == ((1,),) * 4


def test_a_snapshot_that_fails_is_made_later_and_those_before_are_kept(tmp_path: Path, monkeypatch: Any) -> None:
    desk = Desk(tmp_path, job(shards=1), Terms(2, lease_s=1e9, snapshot_every=1))
    server, worker = desk.join("s", "server"), desk.join("w")
    desk.say(worker, "done", items=[["task", 0]])
    desk.say(server, "file", number=1, shard=0, name="0.json")
    desk.say(worker, "done", items=[["task", 1]])
    desk.say(server, "unwritten", number=2, why="the disk is full")
    assert [one.number for one in desk.state.snapshots] == [1] and desk.state.snapshot is None
    desk.settle()
    assert desk.state.snapshot is None
    monkeypatch.setattr("time.monotonic", lambda: 1e12)
    desk.settle()
    assert desk.state.snapshot is not None and desk.state.snapshot.number == 3


def test_events_that_a_full_disk_took_by_half_spoil_no_others(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def events() -> list[str]:
        lines = (desk.directory.root / "events.jsonl").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines if line.endswith("}")]

    room, write = [30, 1], os.write

    def little(file: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: room.pop(0)])

    desk.join("a")
    before = events()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", little)
        for nonce in "bcd":  # half of a line, no more than its end, nothing at all
            desk.join(nonce)
    desk.join("e")
    assert events() == [*before, "joined"] and len(desk.state.seats) == 5


def test_a_long_journal_becomes_one_record(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "_COMPACT_AT", 8)
    desk.join("s", "server")
    worker = desk.join("w")
    for number in range(1, 7):
        desk.say(worker, "next", number)
        desk.say(worker, "done", items=[["task", number - 1]])
    assert len(desk.store.records) < 8 and desk.store.records[0]["is"] == "state"
    assert desk.again().state.tasks.counts()["done"] == 6


def test_no_task_is_dealt_to_two_workers_that_are_there(tmp_path: Path) -> None:
    desk = Desk(tmp_path, job(), Terms(400, lease_s=1e9, ahead=3))
    desk.join("s", "server")
    draws = random.Random(7)
    peers: dict[str, Peer] = {}
    for number in range(1, 600):
        event = draws.random()
        if len(peers) < 3:
            peers[f"w{number}"] = desk.join(f"w{number}")
        elif event < 0.05:
            desk.say(peers.pop(draws.choice(list(peers))), "close")
        elif event < 0.1:
            desk = desk.again()
            peers = {name: desk.join(name, holding=held_by(desk, name)) for name in peers}
            desk.join("s", "server")
        else:
            name = draws.choice(list(peers))
            desk.say(peers[name], "next", 1000 + number)
            if event > 0.5 and (held := held_by(desk, name)):
                desk.say(peers[name], "done", items=held[:1])
        seats = desk.state.seats
        held_now = [item for id in seats for item in desk.state.tasks.held(id)]
        assert len(held_now) == len(set(held_now))
        counts = desk.state.tasks.counts()
        assert counts["done"] + counts["dealt"] + counts["waiting"] == counts["next"]  # none is lost


def held_by(desk: Desk, nonce: str) -> list[list[Any]]:
    seat = desk.state.seat_of(nonce)
    assert seat is not None
    return listed(desk.state.tasks.held(seat.id))


WORDS = st.tuples(
    st.sampled_from(["server", "worker", "next", "next", "done", "back", "close", "sync", "leave", "file", "time"]),
    st.integers(0, 7),
)


@settings(max_examples=60)
@given(words=st.lists(WORDS, max_size=40), cut=st.booleans())
def test_the_next_coordinator_knows_what_this_one_knew(
    tmp_path_factory: pytest.TempPathFactory, words: list[tuple[str, int]], cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("desk")
    desk = Desk(folder, job(replication=2), Terms(30, lease_s=LEASE_S, ahead=2, snapshot_every=4))
    peers: dict[str, Peer] = {}
    for number, (word, draw) in enumerate(words):
        alive = [nonce for nonce, peer in peers.items() if not peer.closed]
        name = alive[draw % len(alive)] if alive else ""
        seat = desk.state.seat_of(name)
        if word in ("server", "worker"):
            peers[str(number)] = desk.join(str(number), word)
        elif word == "time":
            desk.pass_s(draw / 7)
        elif seat is None:
            continue
        elif word in ("done", "back"):
            held = desk.state.tasks.held(seat.id)[:1]
            desk.say(peers[name], word, items=[[order.value, k] for order, k in held])
        elif word == "sync":
            for move in [move for move in desk.state.view.moves if move.source == seat.id][:1]:
                desk.say(peers[name], "synced", shard=move.shard, target=move.target, begun=move.begun)
        elif word == "file" and desk.state.snapshot:
            desk.say(peers[name], "file", number=desk.state.snapshot.number, shard=draw % 4, name=f"{draw}")
        elif word in ("next", "leave", "close"):
            desk.say(peers[name], word)
    if cut:
        desk.store.replace(desk.state.to_record())
    assert desk.again().state.to_record() == json.loads(json.dumps(desk.state.to_record()))
    assert not desk.state.view.chains or desk.state.failed or all(desk.state.view.chains)
