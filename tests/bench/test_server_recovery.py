"""Stalls are read from diaries, and the table says what was measured. The benchmark itself takes minutes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from paceline.bench.server import recovery
from paceline.bench.server.recovery_job import longest
from paceline.errors import RecipeError


class Job:
    """Each thing takes a tenth of a second longer every time."""

    def __init__(self) -> None:
        self.times = 0

    def _taken(self, *watched: float) -> float:
        self.times += 1
        return self.times / 10

    kill_server = kill_worker = join_server = join_worker = _taken

    def usual_s(self) -> list[float]:
        return [0.02, 0.03]


def test_a_stall_is_the_longest_time_that_reaches_into_the_span():
    times = [0.0, 5.0, 5.1, 5.5, 5.6, 9.0]
    assert longest(times, 5.2, 5.55) == pytest.approx(0.4)
    assert longest(times, 5.05, 5.08) == pytest.approx(0.1)
    assert longest(times, 5.0, 7.0) == pytest.approx(3.4)


def test_what_was_measured_is_shown(monkeypatch):
    @contextmanager
    def job(*sizes: object) -> Iterator[Job]:
        assert sizes == (3, 3, 1 << 18, 0.005, 2, "durable")
        yield Job()

    monkeypatch.setattr(recovery, "recovery_job", job)
    found = recovery.run({"recovery_repeats": "3", "recovery_task_ms": "5", "recovery_log": "durable"})
    figures = found["recovery"]
    assert (figures["server_kill_stall_s"]["median"], figures["server_kill_stall_s"]["worst"]) == (0.5, 0.9)
    assert figures["join_s"]["worst"] == 1.0 and figures["worker_kill_stall_s"]["worst"] == 1.1
    assert figures["usual_s"]["count"] == 6
    console = Console(width=120, record=True)
    recovery.show(console, found)
    assert "stall after SIGKILL of a server" in console.export_text()


def test_a_replica_is_needed():
    with pytest.raises(RecipeError, match="recovery_replication"):
        recovery.run({"recovery_replication": "1"})
