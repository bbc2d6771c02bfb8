"""Servers die, join, leave and are cut off while workers push: nothing acknowledged is lost, nothing counts twice."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from paceline.errors import ConnectionLost, ExchangeError
from tests.exchange.server.labour import check, job, labour
from tests.exchange.server.town import town


def test_nothing_happens(tmp_path):
    with town(job("bsp", replication=2), tmp_path, 3) as place:
        with labour(place, 2) as work:
            work.more(20)
        check(work)


@pytest.mark.parametrize("victim", ["head", "middle", "tail"])
def test_a_server_dies(tmp_path, victim):
    with town(job(replication=3), tmp_path, 4) as place:
        with labour(place, 3) as work:
            work.more(20)
            place.kill(place.view.chains[0][("head", "middle", "tail").index(victim)])
            work.more(20)
            place.settle()
            work.more(20)
        check(work)


@pytest.mark.parametrize("mode", ["asp", "bsp"])
def test_one_after_the_other_dies(tmp_path, mode):
    with town(job(mode, pieces=2, replication=2), tmp_path, 4) as place:
        with labour(place, 2) as work:
            for _ in range(3):
                work.more(10)
                place.kill(place.view.head(0))
                work.more(10)
                place.add()
                place.settle()
        check(work)


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_servers_join_and_leave(tmp_path, replication):
    with town(job("ssp(2)", replication=replication), tmp_path, 2) as place:
        with labour(place, 2) as work:
            for _ in range(2):
                work.more(10)
                place.add()
                work.more(10)
                place.settle()
            for id in list(place.servers)[:2]:
                work.more(10)
                place.leave(id)
            work.more(10)
            place.settle()
        check(work)
        assert len(place.servers) == 2


def test_a_server_that_is_taken_for_dead_commits_nothing(tmp_path):
    with town(job(replication=2), tmp_path, 3) as place:
        with labour(place, 2) as work:
            work.more(10)
            head = place.view.head(0)
            connected = [
                (server, peer) for server in place.servers.values() for peer in server._peers if peer.server == head
            ]
            old = place.cut_off(head)
            work.more(10)
            place.settle()
            while any(peer in server._peers for server, peer in connected):  # nobody waits for it to read its answers
                time.sleep(0.005)
            before = {shard: replica.committed for shard, replica in old.keeper.replicas.items()}
            work.more(10)
            after = {shard: replica.committed for shard, replica in old.keeper.replicas.items()}
            assert before == after
            old.close()
        check(work)


def test_a_server_that_cannot_write_its_log_is_followed_by_others(tmp_path, monkeypatch):
    with town(job(replication=2), tmp_path, 3) as place:
        with labour(place, 2) as work:
            work.more(10)
            head = place.view.head(0)

            def fails(records):
                raise ExchangeError("no room")

            monkeypatch.setattr(place.servers[head]._log, "append", fails)
            while not place.failures:
                time.sleep(0.005)
            assert str(place.failures[0]) == "no room"
            place.kill(head)
            place.failures.clear()
            work.more(10)
            place.settle()
        check(work)


def test_heads_turn_while_workers_push(tmp_path):
    with town(job("bsp", replication=2), tmp_path, 1) as place:
        with labour(place, 2) as work:
            work.more(10)
            for _ in range(2):
                place.add()  # all shards are on both servers then, and the first one was head of all
                place.settle()
                assert sorted(Counter(chain[0] for chain in place.view.chains).values()) == [3, 3]
                assert any(view.turns for view in place.views)
                work.more(20)
                place.kill(min(place.servers))
                work.more(10)
        check(work)


def test_a_source_dies_while_it_copies(tmp_path):
    with town(job(replication=2), tmp_path, 2) as place:
        with labour(place, 2) as work:
            work.more(10)
            place.kill(1)
            place.add()
            work.more(5)
            joined = place.add()
            place.settle()
            place.kill(joined)
            work.more(10)
            place.settle()
        check(work)


class Swallowed:
    """A connection of which nothing arrives, and that does not end by itself."""

    sent_bytes = received_bytes = 0

    def __init__(self):
        self._closed = threading.Event()

    def send(self, frame):
        if self._closed.is_set():
            raise ConnectionLost("closed")

    def receive(self):
        self._closed.wait()
        raise ConnectionLost("closed")

    def close(self):
        self._closed.set()


def refused():
    raise ConnectionLost("no way")


@pytest.mark.parametrize("way", [refused, Swallowed])
def test_two_servers_that_do_not_reach_each_other_share_nothing_any_more(tmp_path, way):
    with town(job(replication=2), tmp_path, 3, lease_s=0.2) as place:
        with labour(place, 2) as work:
            work.more(10)
            pair = place.view.chains[0]
            place.apart = frozenset(pair)
            for one, other in (pair, pair[::-1]):
                server, there = place.servers[one], place._addresses[other]
                real = server._connect

                def connect(address, real=real, there=there):
                    return way() if address == there else real(address)

                server._connect = connect
                for outlet in server.keeper.outlets:
                    if outlet.server == other:
                        outlet._connect = connect
                        outlet._connection.close()
            work.more(20)
            with place.changed:
                parted = place.changed.wait_for(
                    lambda: all(not place.apart <= set(chain) for chain in place.view.chains), 10
                )
            assert parted, place.view
            place.settle()  # each shard has two copies, on servers that reach each other
            assert all(not place.apart <= set(chain) for chain in place.view.chains)
            work.more(10)
        check(work)
