"""What a signal does to a run: workers leave, servers write what they have, and a second one ends all that."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from paceline.errors import RankFailed
from paceline.exchange.terms import Terms
from paceline.runtime.job.signals import NotedSignals
from paceline.train.servers.supervisor import stopping
from paceline.train.servers.supervisor.clusters import Clusters
from paceline.train.servers.supervisor.stopping import stop_by_signal, stop_unwritten
from paceline.train.servers.supervisor.workforce import Workforce
from paceline.train.servers.watch.status import Status
from paceline.train.servers.worker.labour import Leaving

RUNNING = Status(begun=True)


class Exchange:
    """Says one status after the other, the last one again and again."""

    def __init__(self, *statuses: Status | None) -> None:
        self.statuses = list(statuses)
        self.asked: list[int] = []  # how many statuses were still to come

    def status(self) -> Status | None:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def ask_for_snapshot(self) -> None:
        self.asked.append(len(self.statuses))


class World:
    """All exchanges and workers of a run. `ends`: what happens while workers leave, `looks`: with each look."""

    def __init__(self, *exchanges: Exchange, ends: Sequence[int] = (), looks: Sequence[int] = ()) -> None:
        self.all = list(exchanges)
        self.signals = NotedSignals()
        self.signals.received.append(signal.SIGTERM)
        self._ends, self._looks = ends, looks
        self.told: list[Any] = []

    def end(self, number: int, patience_s: float, hurried: Callable[[], bool]) -> None:
        self.told.append((number, hurried()))
        self.signals.received += self._ends
        self.told.append(hurried())

    def look(self) -> None:
        self.signals.received += self._looks

    def stop(self) -> bool:
        return stop_by_signal(cast(Clusters, self), cast(Workforce, self), self.signals)

    def stop_unwritten(self) -> str:
        self.signals.received.clear()
        full = OSError(errno.ENOSPC, "No space left on device")
        return str(stop_unwritten(full, cast(Clusters, self), cast(Workforce, self), self.signals))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_POLL_S", 0.0)


def saved(number: int) -> Status:
    return Status(begun=True, snapshots=(number,))


def test_a_snapshot_that_was_begun_before_the_workers_left_is_not_enough() -> None:
    made = Exchange(
        Status(begun=True, snapshots=(3,), saving=4),
        Status(begun=True, snapshots=(3,), saving=4),
        saved(4),  # and an older one is gone
        Status(begun=True, snapshots=(4,), saving=5),
        saved(5),
    )
    world = World(made)
    assert world.stop() and world.told[0] == (signal.SIGTERM, False)
    assert made.asked == [2] and made.statuses == [saved(5)]


def test_it_is_asked_for_until_somebody_hears_it_and_again_if_it_fails() -> None:
    made = Exchange(None, RUNNING, None, RUNNING, Status(begun=True, saving=1), RUNNING, saved(2))
    assert World(made).stop()
    assert made.asked == [5, 3, 1]  # nobody was there; nobody heard it; it failed


def test_what_has_not_begun_or_is_at_its_end_is_not_saved() -> None:
    none, over, other = Exchange(Status()), Exchange(Status(begun=True, finished=True)), Exchange(RUNNING, saved(1))
    assert World(none, over, other).stop()
    assert none.asked == over.asked == [] and other.asked == [1]


def test_a_second_signal_ends_it_at_once() -> None:
    world = World(made := Exchange(RUNNING), ends=[signal.SIGINT])
    assert not world.stop() and world.told == [(signal.SIGTERM, False), True] and made.asked == []
    assert not World(made, looks=[signal.SIGINT]).stop()


def test_a_job_that_fails_meanwhile_says_so_and_one_that_hangs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailed, match="all copies are lost"):
        World(Exchange(RUNNING, Status(failed="all copies are lost"))).stop()
    monkeypatch.setattr(stopping, "_SNAPSHOT_S", 0.0)
    with pytest.raises(RankFailed, match="no snapshot within 0 s"):
        World(Exchange(RUNNING)).stop()


def test_where_figures_cannot_be_written_the_run_is_saved_if_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No space left on device). It was stopped and saved." in World(Exchange(RUNNING, saved(1))).stop_unwritten()
    assert "by a signal, unsaved" in World(Exchange(RUNNING), looks=[signal.SIGINT]).stop_unwritten()
    monkeypatch.setattr(stopping, "_SNAPSHOT_S", 0.0)
    assert "not saved: servers wrote no snapshot" in World(Exchange(RUNNING)).stop_unwritten()


def test_a_worker_that_is_told_twice_to_leave_ends_and_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    codes: list[int] = []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(threading.Timer, "start", lambda timer: None)
    leaving = Leaving()
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert leaving.asked and not codes
    handlers[signal.SIGINT](signal.SIGINT, None)
    assert codes == [0]


def test_the_last_figures_are_of_all_and_rates_are_those_of_work() -> None:
    before = Status(
        figures={"server-1": {"updates": 8, "updates_per_s": 4.0}, "worker-2": {}, "worker-3": {"pushes": 3}}
    )
    end = Status(figures={"server-1": {"updates": 9, "updates_per_s": 0.0}}, left={"worker-2": {"pushes_per_s": 1.0}})
    assert before.last_figures(end) == {
        "server-1": {"updates": 9, "updates_per_s": 4.0},
        "worker-2": {"pushes_per_s": 1.0},
        "worker-3": {"pushes": 3},
    }


def test_what_a_coordinator_says_of_its_job() -> None:
    member = {"role": "worker", "id": 3, "leaving": False, "figures": {"pushes": 5}}
    values: dict[str, Any] = {
        "state": "running",
        "why": "",
        "view": {"chains": [[1]]},
        "tasks": {"done": 7},
        "members": [{**member, "id": 4, "figures": None}, member],
        "left": [{**member, "id": 2}, {**member, "figures": {"pushes": 4}}],
        "snapshots": [{"number": 5, "clock": 1}],
        "saving": {"number": 6, "clock": 2},
    }
    status = Status.of(values, Terms(9))
    assert (status.begun, status.snapshots, status.saving) == (True, (5,), 6)
    assert list(status.figures) == ["worker-3", "worker-4"]
    assert status.left == {"worker-2": {"pushes": 5}, "worker-3": {"pushes": 4}}
    none = {**values, "view": {"chains": []}, "tasks": {"done": 4}, "saving": None}
    assert not Status.of(none, Terms(9, first_task=4)).begun and Status.of(none, Terms(9)).begun
