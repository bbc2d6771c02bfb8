"""Stores that are servers of their own, real ones: what the embedded one promises, they promise too."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.membership import Role, charge
from paceline.exchange.membership.etcd import Etcd
from paceline.exchange.membership.redis import Redis
from paceline.exchange.membership.store import Store
from paceline.exchange.membership.stores import opened
from paceline.exchange.terms import Terms
from tests.exchange.membership.village import job, village
from tests.ports import free_port, free_ports


def etcd(folder: Path) -> tuple[list[str], int, str]:
    client, peer = free_ports(2)
    here = f"http://127.0.0.1:{client}"
    there = f"http://127.0.0.1:{peer}"
    command = [
        "etcd",
        "--data-dir",
        str(folder / "etcd"),
        "--listen-client-urls",
        here,
        "--advertise-client-urls",
        here,
    ]
    command += ["--listen-peer-urls", there, "--initial-advertise-peer-urls", there]
    return [*command, "--initial-cluster", f"default={there}"], client, f"etcd://127.0.0.1:{client}/tests"


def redis(folder: Path) -> tuple[list[str], int, str]:
    pytest.importorskip("redis", reason="the package redis is not installed")
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    return [*command, "--appendonly", "yes"], port, f"redis://127.0.0.1:{port}/0"


class Server:
    """The process of a store."""

    def __init__(self, command: list[str], port: int, url: str) -> None:
        self.url = url
        self._command, self._port = command, port
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError(f"{self._command[0]} did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module", params=[etcd, redis])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    make: Callable[[Path], tuple[list[str], int, str]] = request.param
    command, port, url = make(tmp_path_factory.mktemp("store"))
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    made = Server(command, port, url)
    yield made
    made.kill()


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    made = Directory(tmp_path)
    made.secret.write_text(tmp_path.name)
    return made


def read(url: str, directory: Directory) -> list[int]:
    store = opened(url, directory)
    try:
        return [record["k"] for record in store.load()]
    finally:
        store.close()


def begun(url: str, directory: Directory) -> Store:
    store = opened(url, directory)
    assert store.load() == []
    return store


def test_what_was_appended_is_there_in_order(server: Server, directory: Directory) -> None:
    store = begun(server.url, directory)
    for k in range(0, 24, 2):
        store.append([{"is": "x", "k": k}, {"is": "x", "k": k + 1}], durable=False)
    assert store.appended == 12
    store.close()
    assert read(server.url, directory) == list(range(24))


def test_one_record_stands_for_all_and_others_follow(server: Server, directory: Directory) -> None:
    store = begun(server.url, directory)
    store.append([{"is": "x", "k": 1}], durable=True)
    store.replace({"is": "x", "k": 50})
    store.append([{"is": "x", "k": 51}], durable=True)
    store.close()
    assert read(server.url, directory) == [50, 51]


def test_jobs_do_not_see_each_other(server: Server, directory: Directory) -> None:
    store = begun(server.url, directory)
    store.append([{"is": "x", "k": 1}], durable=True)
    directory.secret.write_text("another")
    assert read(server.url, directory) == []
    store.close()


def test_only_one_is_in_charge(server: Server, directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = begun(server.url, directory)
    second = opened(server.url, directory)
    monkeypatch.setattr(charge, "_WAIT_S", 0.0)
    with pytest.raises(ExchangeError, match="in charge"):
        second.load()
    first.close()
    assert second.load() == []
    second.close()


def test_who_is_not_in_charge_any_more_cannot_write(server: Server, directory: Directory) -> None:
    first = begun(server.url, directory)
    assert isinstance(first, Etcd | Redis)
    first.append([{"is": "x", "k": 1}], durable=True)
    first.release(first.token)  # as if its lease had passed
    second = opened(server.url, directory)
    second.load()
    with pytest.raises(ExchangeError, match="in charge"):
        first.append([{"is": "x", "k": 2}], durable=True)
    second.append([{"is": "x", "k": 3}], durable=True)
    second.close()
    first.close()
    assert read(server.url, directory) == [1, 3]


def test_nobody_waits_for_the_lease_of_a_process_that_ended(
    server: Server, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, sys; from pathlib import Path; from paceline.exchange.directory import Directory; "
        "from paceline.exchange.membership.stores import opened; "
        "store = opened(sys.argv[1], Directory(Path(sys.argv[2]))); store.load(); "
        "store.append([{'is': 'x', 'k': 5}], durable=False); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, server.url, str(directory.root)], check=False, timeout=30)
    monkeypatch.setattr(charge, "_WAIT_S", 0.0)
    assert read(server.url, directory) == [5]


def test_a_store_that_is_started_again_is_waited_for(server: Server, directory: Directory) -> None:
    store = begun(server.url, directory)
    store.append([{"is": "x", "k": 1}], durable=True)
    server.kill()
    server.start()
    store.append([{"is": "x", "k": 2}], durable=True)
    store.close()
    assert read(server.url, directory) == [1, 2]


def test_a_job_goes_on_after_its_coordinator_was_killed(server: Server) -> None:
    with village(job(), Terms(40, lease_s=5), store=server.url) as here:
        here.person(Role.SERVER)
        worker = here.person(Role.WORKER)
        here.wait(lambda: (status := here.status()) and status["tasks"]["done"] > 5)
        here.coordinator.kill()
        here.start()
        worker.line("end")
        here.phase("finished")
        assert not list(here.directory.journal.iterdir())
        assert not here.events("gone")


def test_a_store_that_cannot_be_reached_is_told(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(charge, "_PATIENCE_S", 0.0)
    with pytest.raises((ExchangeError, ConnectionLost), match="could not be reached"):
        opened(f"etcd://127.0.0.1:{port}/x", directory).load()
