"""Where a job is durable, nobody hears of an update before the logs of all its copies are on the disk."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from paceline.exchange.job import Consistency, DenseTable, Job
from paceline.exchange.shard.settling import Settling
from tests.exchange.server.town import town

ASP = Consistency.parse("asp")


@pytest.mark.parametrize("replication", [1, 2])
def test_an_update_is_acknowledged_once_it_is_on_the_disk(tmp_path, monkeypatch, replication):
    of = Job((DenseTable("weight", (64,), consistency=ASP),), shards=1, replication=replication)
    sync, may, asked = os.fdatasync, threading.Event(), threading.Semaphore(0)
    fails = []

    def slow(file):
        asked.release()
        if not may.wait(10):
            fails.append("nobody let it go on")
        sync(file)

    with town(of, tmp_path, 2, durable=True) as place:
        worker = place.worker(1)
        monkeypatch.setattr(os, "fdatasync", slow)
        worker.push([0], {0: torch.ones(64)}, {})
        flushed = threading.Thread(target=worker.flush, daemon=True)
        flushed.start()
        for _ in range(replication):
            assert asked.acquire(timeout=5)  # each copy waits for its own disk
        flushed.join(0.05)
        assert flushed.is_alive()
        may.set()
        flushed.join(10)
        assert not flushed.is_alive() and not fails
        worker.close()


def test_who_asks_together_shares_a_write(tmp_path, monkeypatch):
    size, calls, may = [1], [], threading.Event()

    def sync(file):
        calls.append(size[0])
        may.wait(10)

    monkeypatch.setattr(os, "fdatasync", sync)
    settling = Settling(0, lambda: size[0])
    first = threading.Thread(target=settling.settle, daemon=True)
    first.start()
    while not calls:
        first.join(0.001)
    size[0] = 2
    others = [threading.Thread(target=settling.settle, daemon=True) for _ in range(8)]
    for other in others:
        other.start()
    may.set()
    for thread in (first, *others):
        thread.join(10)
        assert not thread.is_alive()
    assert calls == [1, 2]  # what came while it was written needs one more
    settling.settle()
    assert calls == [1, 2]


def test_a_disk_that_fails_is_told_to_all(monkeypatch):
    def sync(file):
        raise OSError("it failed")

    monkeypatch.setattr(os, "fdatasync", sync)
    settling = Settling(0, lambda: 1)
    for _ in range(2):
        with pytest.raises(OSError, match="it failed"):
            settling.settle()


def test_what_a_disk_has_lost_once_is_lost_though_it_says_nothing_more(monkeypatch):
    calls = iter([OSError("it failed")])

    def sync(file):
        for error in calls:
            raise error

    monkeypatch.setattr(os, "fdatasync", sync)
    settling = Settling(0, lambda: 1)
    for _ in range(2):
        with pytest.raises(OSError, match="it failed"):
            settling.settle()
