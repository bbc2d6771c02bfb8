"""The coordinator is killed and started again while the job goes on; connections break; nobody loses its number."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace

import pytest

from paceline.exchange.interface import Deal, Order
from paceline.exchange.membership import Role
from paceline.exchange.membership import member as members
from paceline.exchange.membership.seats import Process
from paceline.exchange.terms import Terms
from tests.exchange.membership.village import job, stopped, village
from tests.ports import free_port


def test_a_killed_coordinator_goes_on_where_it_was() -> None:
    with village(job(pieces=2), Terms(160, workers=2, servers=2, ahead=2, snapshot_every=20, lease_s=20)) as here:
        servers = [here.person(Role.SERVER) for _ in range(2)]
        workers = [here.person(Role.WORKER, pause_s=0.002) for _ in range(2)]
        for at in (20, 90):
            here.wait(lambda at=at: (status := here.status()) and status["tasks"]["done"] > at)
            here.coordinator.kill()
            here.start()
        for worker in workers:
            worker.line("end")
        here.phase("finished")
        done = Counter(line.split()[1] for worker in workers for line in worker.lines if line.startswith("task"))
        assert sorted(map(int, done)) == list(range(160))
        assert set(done.values()) == {1}
        assert len(here.events("recovered")) == 2
        assert len(here.events("joined")) == 4 and not here.events("gone")
        assert here.status()["tasks"]["clock"] == 80  # type: ignore[index]
        for server in servers:
            server.send(signal.SIGTERM)
            server.line("left")


def test_who_died_while_the_coordinator_was_away_is_missed_at_once() -> None:
    with village(job(replication=2), Terms(3, servers=2, lease_s=25)) as here:
        servers = [here.person(Role.SERVER) for _ in range(2)]
        here.wait(lambda: here.status()["view"]["chains"])  # type: ignore[index]
        victim = here.person(Role.WORKER, holds=1)
        task = int(victim.line("task").split()[1])
        here.coordinator.kill()
        victim.kill()
        servers[0].kill()
        here.start()
        assert here.member().next_task() == Deal(Order.TASK, task, alone=True)
        view = here.member().view
        assert len(view.servers) == 1
        assert all(len(chain) == 1 for chain in view.chains)
        assert len(here.events("gone")) == 2


def test_ids_are_not_used_again() -> None:
    with village(job(), Terms(1)) as here:
        first = here.member()
        first.leave()
        here.coordinator.kill()
        here.start()
        assert here.member().id == first.id + 1
        here.coordinator.kill()
        here.start("--anew")
        assert here.member().id == first.id + 2
        assert here.status()["members"][0]["id"] == first.id + 2  # type: ignore[index]


def test_a_member_whose_connection_breaks_comes_back_as_itself() -> None:
    with village(job(), Terms(4, ahead=2)) as here:
        here.person(Role.SERVER)
        worker = here.member()
        here.phase("running")
        held = worker.next_task()
        worker._link._hang_up()
        assert worker.next_task() == Deal(Order.TASK, 1)
        worker.done([held])
        here.wait(lambda: here.status()["tasks"]["done"] == 1)  # type: ignore[index]
        assert not here.events("gone") and not worker.fenced
        assert here.status()["tasks"]["dealt"] == 1  # type: ignore[index]


def test_what_was_done_while_nobody_heard_it_is_heard_later() -> None:
    with village(job(), Terms(4, ahead=3)) as here:
        here.person(Role.SERVER)
        worker = here.member()
        here.phase("running")
        deals = [worker.next_task() for _ in range(3)]
        here.coordinator.kill()
        worker.done(deals[:1])
        worker.put_back(deals[1:2])
        here.start()
        here.wait(lambda: here.status()["tasks"]["done"] == 1)  # type: ignore[index]
        assert worker.next_task() == deals[1]._replace(alone=True)
        assert not here.events("gone")


def test_who_cannot_be_seen_has_a_moment_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members.Process, "own", lambda: Process("another host", 1, 1))
    with village(job(), Terms(4)) as here:
        here.person(Role.SERVER)
        stays, goes = here.member(), here.member()
        here.phase("running")
        stays._link._hang_up()
        goes._link.close()
        gone = here.wait(lambda: here.events("gone"))
        assert [(event["id"], event["why"]) for event in gone] == [(goes.id, "its connection ended")]
        assert stays.next_task().order is Order.TASK


def test_members_of_other_hosts_come_by_tcp() -> None:
    with village(job(), Terms(2), port=free_port()) as here:
        away = replace(here.charter.coordinator, machine="another host")
        here.charter = replace(here.charter, coordinator=away)
        here.person(Role.SERVER)
        worker = here.member()
        here.phase("running")
        here.coordinator.kill()
        here.start()
        assert worker.next_task() == Deal(Order.TASK, 0)


def test_a_coordinator_that_was_stopped_accuses_nobody_and_nobody_leaves_it() -> None:
    with village(job(replication=2), Terms(40, servers=2, lease_s=1.0)) as here:
        for _ in range(2):
            here.person(Role.SERVER)
        worker = here.member()
        here.phase("running")
        held = worker.next_task()
        stopped(here.coordinator)
        renewals: list[None] = []
        renew = worker._link.renew
        worker._link.renew = lambda: (renewals.append(None), renew())[1]  # type: ignore[method-assign]
        here.wait(lambda: renewals)
        assert worker.trusted and not worker.fenced
        here.coordinator.send(signal.SIGCONT)
        worker.done([held])
        here.wait(lambda: (status := here.status()) and status["tasks"]["done"] == 1)
        assert worker.next_task() == Deal(Order.TASK, 1)
        assert not here.events("gone")
