"""A server's life ends with an error of any of its threads: none of them goes missing unheard."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.membership.member import Member
from paceline.exchange.membership.service import Service, serve
from paceline.exchange.server.life import Life
from paceline.exchange.server.snapshots import SnapshotWriter
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address

JOB = Job((DenseTable("w", (4,)),), shards=1)


@contextmanager
def begun() -> Iterator[Directory]:
    """A job with a coordinator, which waits for a second server."""
    with TemporaryDirectory(prefix="paceline-") as folder:  # short: it holds sockets
        directory = Directory(Path(folder))
        directory.write(Charter(JOB, Terms(tasks=1, servers=2), Address(unix=f"{folder}/c")))
        ready: queue.SimpleQueue[Service] = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: serve(directory, ready=ready.put))
        thread.start()
        service = ready.get()
        try:
            yield directory
        finally:
            service.stop()
            thread.join()


def test_the_writer_of_snapshots_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: SnapshotWriter) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(SnapshotWriter, "run", fails)
    with begun() as directory, pytest.raises(OSError, match="the disk is gone"):
        Life(directory).run()


def test_telling_figures_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Member, figures: object) -> None:
        raise ValueError("no figures")

    monkeypatch.setattr("paceline.exchange.server.life._REPORT_S", 0.01)
    monkeypatch.setattr(Member, "report", fails)
    with begun() as directory, pytest.raises(ValueError, match="no figures"):
        Life(directory).run()


@pytest.mark.parametrize(("told", "found"), [(None, "127.0.0.1"), ("10.1.2.3", "10.1.2.3")])
def test_it_listens_on_the_interface_of_the_job_or_on_that_of_its_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str | None, found: str
) -> None:
    def listens(bind: str, *_: object, **__: object) -> None:
        raise ExchangeError(f"on {bind}")

    monkeypatch.setattr("paceline.exchange.server.life.Listener", listens)
    directory = Directory(tmp_path)
    directory.write(Charter(JOB, Terms(tasks=1), Address(unix="c")))
    with pytest.raises(ExchangeError, match=f"on {found}"):
        Life(directory, told).run()
