"""Whole runs as `paceline train` starts them: equal to serial, through deaths and restarts, and replayed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.train.metrics import read_metrics
from tests.train.servers.runs import PATIENCE_S, TOYS, gap, paceline, proved, serial, sets, started


def test_stopped_and_resumed_a_synchronous_run_is_serial(tmp_path: Path) -> None:
    out = tmp_path / "run"
    schedule = "{name: StepLR, step_size: 3, gamma: 0.9}"
    with started(out, *sets(train__steps=4000, train__clip=0.3, schedule=schedule)) as run:
        run.until(lambda: run.steps() >= 3)
        run.process.send(signal.SIGTERM)
        assert run.finish() == 143
        assert "saved it. To go on:" in run.said and "--resume" in run.said
    done = run.steps()
    with started(out, "--resume", *sets(train__steps=done + 12), recipe=out / "config.yaml") as run:
        assert run.finish() == 0, run.said
        assert "paceline verify --replay" in run.said
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, done + 13))
    assert [round(row["lr"], 9) for row in rows] == [round(0.2 * 0.9 ** (step // 3), 9) for step in range(done + 12)]
    assert all(row["grad_norm"] > 0 for row in rows) and max(row["grad_norm"] for row in rows) > 0.3
    assert gap(out, serial(out / "config.yaml", done + 12)) < 1e-9
    assert read_metrics(out / "metrics.jsonl", "validation")[-1]["step"] == done + 12
    assert figures(out, "worker", "pushes", last=True), "the last line tells of workers that have left"
    assert all((out / "logs" / name).exists() for name in ("server-1.log", "server-1-before-1.log"))
    assert proved(out) == ["exchange-before-1", "exchange"]


def test_a_synchronous_run_goes_on_from_a_snapshot_of_its_midst_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    events = out / "exchange" / "events.jsonl"
    with started(out, *sets(train__steps=100_000, checkpoint__every=7, server__servers=2, server__shards=6)) as run:
        run.until(lambda: events.exists() and events.read_text().count('"event": "snapshot"') >= 3)
        for process in [*psutil.Process(run.process.pid).children(recursive=True), run.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert run.finish() == -signal.SIGKILL
    saved = max(
        event["clock"] for event in map(json.loads, events.read_text().splitlines()) if event["event"] == "snapshot"
    )
    with started(out, "--resume", *sets(train__steps=saved + 9), recipe=out / "config.yaml") as run:
        assert run.finish() == 0, run.said
    assert gap(out, serial(out / "config.yaml", saved + 9)) < 1e-9
    assert proved(out) == ["exchange-before-1", "exchange"]


def test_an_asynchronous_run_outlives_deaths_and_is_replayed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = sets(
        server="{consistency: asp, servers: 2, replication: 2, shards: 4, durable: true, lease_s: 3}",
        train="{steps: 100000, batch: 16}",
        optimizer="{name: Adagrad, lr: 0.05}",
    )
    with started(out, *given, sleep_s=0.005) as run:
        run.until(lambda: run.steps() >= 3 and all(len(pids) == 2 for pids in run.members().values()))
        victims = run.members()
        killed, stopped = victims["worker"]
        joining = paceline("join", out, "worker", output=tmp_path / "joined")
        os.kill(killed, signal.SIGKILL)
        os.kill(stopped, signal.SIGSTOP)
        run.until(lambda: len(set(run.members()["worker"]) - {killed, stopped}) >= 2)
        (coordinator,) = [
            process
            for process in psutil.Process(run.process.pid).children(recursive=True)
            if "paceline.exchange.membership" in process.cmdline()
        ]
        coordinator.kill()
        run.until(lambda: len(run.members()["server"]) == 2)
        os.kill(victims["server"][0], signal.SIGKILL)
        run.until(lambda: len(set(run.members()["server"]) - {victims["server"][0]}) == 2)
        try:
            run.until(lambda: stopped not in run.members()["worker"])
            os.kill(stopped, signal.SIGCONT)
            run.until(lambda: stopped in run.members()["worker"] and len(run.members()["worker"]) == 3)
        finally:
            joining.send(signal.SIGTERM)
        assert joining.wait(PATIENCE_S) == 143
        run.until(lambda: figures(out, "server", "updates") and figures(out, "worker", "pushes"))
        run.process.send(signal.SIGINT)
        assert run.finish() == 130, run.said
    assert figures(out, "worker", "pushes", last=True)
    assert proved(out) == ["exchange"]
    assert not list((out / "logs").glob("*-joined-*")), "the log of who joined has its number too"
    assert "the coordinator is back" in run.said and "is gone: its process ended" in run.said
    events = [json.loads(line) for line in (out / "exchange" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("recovered") == 1


def figures(out: Path, role: str, figure: str, *, last: bool = False) -> bool:
    """Whether any line of figures, or the last one, has seen a member of that role do something."""
    rows = [row["members"] for row in read_metrics(out / "metrics.jsonl", "members")][-1 if last else 0 :]
    return any(values.get(figure, 0) > 0 for row in rows for name, values in row.items() if name.startswith(role))


def test_a_fault_of_the_program_ends_the_run_with_its_words(tmp_path: Path) -> None:
    with started(tmp_path / "run", *sets(data__dataset=f"{TOYS}:rotten")) as run:
        assert run.finish() == 1
    assert "sample 77 is rotten" in run.said
