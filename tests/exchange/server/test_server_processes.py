"""Servers as processes: killed, stopped, sent away and joined by others while workers push; then all is replayed."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator

import pytest
import torch

from paceline.exchange.replay.whole import replay
from paceline.exchange.shard.whole import Tables, read_tables
from paceline.exchange.terms import Terms
from tests.exchange.chaos.cast import Cast, cast
from tests.exchange.chaos.toil import Toil, job


@pytest.fixture(autouse=True)
def _stacks() -> Iterator[None]:
    faulthandler.dump_traceback_later(170, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def check(play: Cast) -> None:
    """What is on disk at the end is what the logs say, computed once more."""
    outcome = replay(play.directory, lambda worker, exchange, dealer: Toil(exchange, dealer).run())
    assert outcome.difference is None
    job, tasks = play.charter.job, play.charter.terms.tasks
    closings = tasks // job.pieces if job.closes_steps else 0
    assert outcome.updates == (tasks + closings) * job.shards


def test_a_server_is_killed_and_another_joins_and_one_leaves() -> None:
    with cast(job("asp", replication=2), Terms(120, servers=3)) as play:
        servers = [play.server() for _ in range(3)]
        for _ in range(2):
            play.worker()
        play.more(10)
        servers[0].send(signal.SIGKILL)
        play.more(10)
        servers.append(play.server())
        play.more(10)
        servers[1].send(signal.SIGTERM)
        assert servers[1].end() == 0
        play.settle(2)
        play.finish()
        check(play)
        assert [event["role"] for event in play.died] == ["server"]


def test_the_middle_of_chains_is_killed() -> None:
    with cast(job("ssp(2)", replication=3), Terms(80, servers=3)) as play:
        servers = [play.server() for _ in range(3)]
        for _ in range(2):
            play.worker()
        play.more(10)
        killed = play.status()["view"]["chains"][0][1]
        next(server for server in servers if killed in server.ids).send(signal.SIGKILL)
        play.more(10)
        play.finish()
        check(play)


def test_a_server_that_was_stopped_for_long_joins_anew() -> None:
    with cast(job("asp", replication=2), Terms(120, servers=2, lease_s=1.0)) as play:
        servers = [play.server() for _ in range(2)]
        for _ in range(2):
            play.worker()
        play.more(10)
        servers[0].send(signal.SIGSTOP)
        play.wait(lambda: play.died, "an eviction")
        play.more(10)
        servers[0].send(signal.SIGCONT)
        play.wait(lambda: len(servers[0].ids) == 2, "a new beginning")
        play.settle(2)
        play.more(10)
        play.finish()
        check(play)
        assert "joins anew" in servers[0].said


def test_a_server_that_was_stopped_for_a_moment_goes_on() -> None:
    with cast(job("bsp", replication=2), Terms(100, servers=2, lease_s=5.0)) as play:
        servers = [play.server() for _ in range(2)]
        for _ in range(2):
            play.worker()
        play.more(10)
        servers[0].send(signal.SIGSTOP)
        play.limit(100)
        play.wait(lambda: play.silent(servers[0].ids[0]) > 3.0, "three seconds of silence")
        servers[0].send(signal.SIGCONT)
        play.finish()
        check(play)
        assert not play.died


def test_the_coordinator_is_killed_and_started_again() -> None:
    with cast(job("asp", replication=2), Terms(140, servers=2, snapshot_every=25)) as play:
        servers = [play.server() for _ in range(2)]
        for _ in range(2):
            play.worker()
        for _ in range(2):
            play.more(10)
            play.coordinator.send(signal.SIGKILL)
            assert play.coordinator.end() == -signal.SIGKILL
            play.start_coordinator()
        play.more(10)
        servers.append(play.server())
        play.more(10)
        servers[0].send(signal.SIGTERM)
        assert servers[0].end() == 0
        play.finish()
        check(play)
        assert len(play.events("recovered")) == 2 and not play.died


def test_a_job_of_one_copy_moves_to_another_server() -> None:
    with cast(job("ssp(1)", replication=1), Terms(100), transport="tcp") as play:
        first = play.server()
        play.worker()
        play.more(10)
        play.server()
        play.more(10)
        first.send(signal.SIGTERM)
        assert first.end() == 0
        play.more(10)
        play.finish()
        check(play)


def test_a_server_that_fails_ends_with_its_reason() -> None:
    with cast(job("asp", replication=1), Terms(100)) as play:
        for file in play.directory.snapshot(0).glob("*.safetensors"):
            file.write_bytes(b"")
        server = play.server()
        assert server.end() == 2
        assert "safetensors" in server.said.splitlines()[-1]


def played(play: Cast, servers: int, workers: int) -> Tables:
    """Let a job come to its end; return what it ended with."""
    for _ in range(servers):
        play.server()
    for _ in range(workers):
        play.worker()
    play.finish()
    return read_tables(play.directory.snapshot(play.status()["snapshot"]), play.charter.job)


def test_a_job_goes_on_from_a_snapshot_with_another_number_of_servers() -> None:
    of = job("bsp", replication=2)
    with cast(of, Terms(40, servers=2)) as play:
        once = played(play, 2, 2)
    with cast(of, Terms(20, servers=2, snapshot_every=7)) as play:
        played(play, 2, 1)
        play.begin_again(play.status()["snapshot"], servers=3, tasks=40)
        again = played(play, 3, 2)
    for of_once, of_again in ((once.dense, again.dense), (once.keys, again.keys), (once.rows, again.rows)):
        assert of_once.keys() == of_again.keys()
        assert all(torch.equal(values, of_again[name]) for name, values in of_once.items())
