"""A coordinator and its members, in processes of their own: joining, working, leaving, dying, being stopped."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from paceline.errors import ExchangeError
from paceline.exchange.interface import Deal, Order
from paceline.exchange.membership import Fenced, Member, Role
from paceline.exchange.terms import Terms
from paceline.exchange.view import Address
from tests.exchange.membership.village import job, stopped, village


def test_the_coordinator_and_members_load_no_torch() -> None:
    code = (
        "import sys, paceline.exchange.membership.__main__, paceline.exchange.membership.service; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_job_from_its_beginning_to_its_end() -> None:
    with village(job("bsp", pieces=2), Terms(20, workers=2, servers=2, evaluate_every=5)) as here:
        assert here.phase("waiting")["tasks"]["done"] == 0
        servers = [here.person(Role.SERVER) for _ in range(2)]
        workers = [here.person(Role.WORKER) for _ in range(2)]
        for worker in workers:
            worker.line("end")
        status = here.phase("finished")
        assert status["tasks"]["done"] == 20
        assert [one["clock"] for one in status["snapshots"]] == [10]
        done = [line for worker in workers for line in worker.lines if line.startswith(("task", "evaluate"))]
        assert sorted(done) == sorted([f"task {k}" for k in range(20)] + ["evaluate 5", "evaluate 10"])
        servers[0].send(signal.SIGTERM)
        servers[0].line("left")
        servers[1].kill()
        here.wait(lambda: len(here.events("left")) == 4)
        assert [event["event"] for event in here.events()][:2] == ["began", "waiting"]
        assert not here.events("gone")  # nobody whom the job still needed


def test_tasks_of_a_killed_worker_go_to_others_alone() -> None:
    with village(job(), Terms(6, workers=1)) as here:
        here.person(Role.SERVER)
        victim = here.person(Role.WORKER, holds=1)
        number = victim.line("task").split()[1]
        other = here.member()
        victim.kill()
        here.wait(lambda: other.orphans)
        deal = other.next_task()
        assert deal == Deal(Order.TASK, int(number), alone=True)
        assert here.events("gone")[0]["why"] == "its process ended"
        other.done([deal])
        here.wait(lambda: not other.orphans)
        assert not other.next_task().alone


def test_what_a_worker_gives_back_or_leaves_goes_to_others() -> None:
    with village(job(), Terms(9, ahead=3)) as here:
        here.person(Role.SERVER)
        one, two = here.member(), here.member()
        here.phase("running")
        first, second = one.next_task(), one.next_task()
        one.put_back([first])
        assert two.next_task() == first._replace(alone=True)
        one.leave()
        assert two.next_task() == second._replace(alone=True)
        assert here.wait(lambda: here.events("left"))[0]["id"] == one.id


def test_shards_of_a_killed_server_stay_with_its_replicas() -> None:
    with village(job(replication=2), Terms(1, servers=3)) as here:
        servers = [here.person(Role.SERVER) for _ in range(3)]
        ids = [int(server.line("joined").split()[1]) for server in servers]
        here.wait(lambda: here.status()["view"]["chains"])  # type: ignore[index]
        watcher = here.member()
        epoch = watcher.view.epoch
        servers[0].kill()
        view = watcher.wait_for_view(epoch, 30)
        assert ids[0] not in view.servers
        assert all(chain and ids[0] not in chain for chain in view.chains)
        here.wait(lambda: all(len(chain) == 2 for chain in watcher.view.chains) and not watcher.view.moves)


def test_servers_come_and_go_and_every_shard_has_one_head() -> None:
    with village(job(shards=8), Terms(1, servers=1)) as here:
        first = here.person(Role.SERVER)
        first.line("joined")
        second = here.person(Role.SERVER)
        new = int(second.line("joined").split()[1])
        here.wait(lambda: {chain[0] for chain in here.member().view.chains} == {new, new - 1})
        first.send(signal.SIGTERM)
        first.line("left")
        assert here.member().view.chains == ((new,),) * 8
        views = [event["chains"] for event in here.events("view") if event["chains"]]
        assert all(chain for chains in views for chain in chains)
        assert here.events("left")[0]["role"] == "server"


def test_a_server_that_is_alone_leaves_once_another_has_come() -> None:
    with village(job(), Terms(1)) as here:
        only = here.person(Role.SERVER)
        only.line("joined")
        only.send(signal.SIGTERM)
        here.wait(lambda: here.events("leaving"))
        here.person(Role.SERVER)
        only.line("left")


def test_a_stopped_server_is_out_after_its_lease_and_fenced_when_it_wakes() -> None:
    with village(job(replication=2), Terms(1, servers=2, lease_s=1.0)) as here:
        servers = [here.person(Role.SERVER) for _ in range(2)]
        ids = [int(server.line("joined").split()[1]) for server in servers]
        here.wait(lambda: here.status()["view"]["chains"])  # type: ignore[index]
        stopped(servers[0])
        gone = here.wait(lambda: here.events("gone"))
        assert gone[0]["id"] == ids[0] and "silent" in gone[0]["why"]
        servers[0].send(signal.SIGCONT)
        servers[0].line("fenced")
        later = here.person(Role.SERVER)
        assert int(later.line("joined").split()[1]) > max(ids)


def test_a_stopped_worker_is_fenced_and_its_task_is_done_by_another() -> None:
    with village(job(), Terms(2, lease_s=1.0)) as here:
        here.person(Role.SERVER)
        victim = here.person(Role.WORKER, pause_s=0.3)
        task = int(victim.line("task").split()[1])
        stopped(victim)
        other = here.member()
        here.wait(lambda: here.events("gone"))
        assert other.next_task() == Deal(Order.TASK, task, alone=True)
        victim.send(signal.SIGCONT)
        assert "worker" in victim.line("Fenced")


def test_below_its_minimum_the_job_waits_and_says_so() -> None:
    with village(job(), Terms(100, workers=2)) as here:
        here.person(Role.SERVER)
        one, two = here.member(), here.member()
        here.phase("running")
        assert one.next_task().order is Order.TASK
        two.leave()
        here.phase("waiting")
        one.done([Deal(Order.TASK, 0)])
        assert one.next_task().order is Order.WAIT
        assert here.events("waiting")[-1]["have"]["workers"] == 1
        here.member()
        here.phase("running")
        assert one.next_task().order is Order.TASK
        assert here.events("going on")[-1]["need"]["workers"] == 2


def test_when_all_copies_of_a_shard_are_lost_the_job_stops_and_says_from_where_to_resume() -> None:
    with village(job(), Terms(4, snapshot_every=2)) as here:
        server = here.person(Role.SERVER)
        worker = here.member()
        here.phase("running")
        for _ in range(2):
            worker.done([worker.next_task()])
        here.wait(lambda: here.events("snapshot"))
        server.kill()
        with pytest.raises(ExchangeError, match="Resume from snapshot 1"):
            here.wait(lambda: worker.done([worker.next_task()]))
        here.phase("failed")
        here.wait(lambda: worker.ended)
        assert "lost" in worker.failure


def test_only_the_last_two_snapshots_are_kept() -> None:
    with village(job(), Terms(8, snapshot_every=2)) as here:
        here.person(Role.SERVER)
        here.directory.snapshot(0).mkdir()
        worker = here.member()
        here.phase("running")
        for made in range(1, 5):
            for _ in range(2):
                worker.done([worker.next_task()])
            here.wait(lambda made=made: len(here.events("snapshot")) >= made)
        names = here.wait(lambda: (n := {p.name for p in here.directory.snapshots.iterdir()}) == {"0", "3", "4"} and n)
        assert (here.directory.snapshot(4) / "manifest.json").exists(), names


def test_another_secret_is_turned_away() -> None:
    with village(job(), Terms(1)) as here, pytest.raises(ExchangeError, match="secret"):
        Member.join(here.charter, b"another", Role.SERVER, Address())


def test_two_coordinators_are_one_too_many() -> None:
    with village(job(), Terms(1)) as here:
        command = [sys.executable, "-m", "paceline.exchange.membership", str(here.directory.root)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert second.returncode == 2
        assert "is running" in second.stderr


def test_who_was_fenced_is_told_why() -> None:
    with village(job(), Terms(1)) as here:
        member = here.member()
        why: list[str] = []
        member.on_fenced(why.append)
        member._hear({"fenced": "it was silent"})
        here.wait(lambda: why)
        with pytest.raises(Fenced, match="it was silent"):
            member.next_task()
        assert member.fenced and not member.trusted
