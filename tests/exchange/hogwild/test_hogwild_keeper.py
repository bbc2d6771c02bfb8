"""A job without servers: the coordinator deals its tasks, and whoever keeps the memory writes what was learnt."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.errors import ExchangeError
from paceline.exchange.hogwild import keeper as hogwild_keeper
from paceline.exchange.hogwild import memory as hogwild_memory
from paceline.exchange.hogwild.exchange import HogwildExchange
from paceline.exchange.hogwild.keeper import attach, keep
from paceline.exchange.hogwild.memory import Memory
from paceline.exchange.hogwild.snapshot import begin
from paceline.exchange.interface import Order, Rows
from paceline.exchange.job import Consistency, DenseTable, Job, Rule, SparseTable
from paceline.exchange.membership import Member, Role
from paceline.exchange.shard.manifest import Manifest
from paceline.exchange.shard.whole import read_tables, write_initial
from paceline.exchange.terms import Terms
from tests.exchange.membership.village import Village, village

ASP = Consistency.parse("asp")
SGD = Rule("sgd", {"lr": 1.0})
TABLES = (DenseTable("bias", (3,), rule=SGD, consistency=ASP), SparseTable("rows", 2, rule=SGD, consistency=ASP))
JOB = Job(TABLES, shards=3, pieces=2)
TASKS = 40


def _kept(place: Village) -> tuple[threading.Thread, list[Exception]]:
    failed: list[Exception] = []

    def run() -> None:
        try:
            keep(place.directory, rows=1000)
        except ExchangeError as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failed


def _work(exchange: HogwildExchange, member: Member) -> None:
    """Each task subtracts 1 from rows of its own."""
    while True:
        deal = member.next_task()
        if deal.order is Order.END:
            return
        if deal.order is Order.TASK:
            keys = torch.arange(10 * deal.number, 10 * deal.number + 10)
            exchange.pull([0], [torch.empty(3)], 0)
            exchange.push([deal.number], {0: torch.ones(3)}, {1: Rows(keys, torch.ones(10, 2))})
        if deal.order in (Order.TASK, Order.EVALUATE):
            member.done([deal])


def _threads(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_job_without_servers_is_dealt_done_and_written_though_its_keeper_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_: object) -> None:
        raise ExchangeError("killed")

    monkeypatch.setattr(hogwild_keeper, "_REPORT_S", 0.01)
    with village(JOB, Terms(TASKS, outlived=True)) as place:
        write_initial(place.directory.snapshots, JOB, {"bias": torch.zeros(3)})
        keeper, failed = _kept(place)
        lost = place.member()
        while lost.next_task().order is not Order.TASK:
            pass
        lost.close()  # it was dealt something, and is gone
        memory = attach(place.directory, (early := place.member()))
        HogwildExchange(memory).push([early.next_task().number], {0: torch.ones(3)}, {})
        with monkeypatch.context() as patch:
            patch.setattr("paceline.exchange.hogwild.keeper._Figures.now", dies)
            keeper.join(30)
        assert [str(error) for error in failed] == ["killed"]
        place.phase("waiting")
        early.close()
        keeper, failed = _kept(place)
        _threads(2, lambda: _work(HogwildExchange(memory), place.member(Role.WORKER)))
        place.phase("finished")
        keeper.join(30)
        assert not keeper.is_alive() and not failed
        assert not place.directory.memory.exists()
        (number,) = {event["number"] for event in place.events("snapshot")}
        directory = place.directory.snapshot(number)
        assert Manifest.read(directory).first_task == TASKS
        tables = read_tables(directory, JOB)
        assert torch.equal(tables.keys["rows"], torch.arange(10 * TASKS))
        assert (tables.rows["rows"] == -1).all()
        assert (tables.dense["bias"] <= -2).all() and (tables.dense["bias"] >= -TASKS - 1).all()
        again = begin(tmp_path / "again", JOB, directory, rows=1000)
        rows = torch.empty(10 * TASKS, 2)
        HogwildExchange(again).pull_rows(1, torch.arange(10 * TASKS), rows, 0)
        assert (rows == -1).all()


def test_memory_of_another_host_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_initial(tmp_path / "snapshots", JOB, {"bias": torch.zeros(3)})
    memory = begin(tmp_path / "memory", JOB, tmp_path / "snapshots" / "0", rows=10)
    assert memory.path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(hogwild_memory, "machine", lambda: "elsewhere")
    with pytest.raises(ExchangeError, match="is the memory of another host"):
        Memory.attach(memory.path, Job.from_dict(json.loads(json.dumps(JOB.to_dict()))))
