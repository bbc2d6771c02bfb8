"""Whole runs with servers beside workers, and with servers for groups of workers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from paceline.exchange.directory import Directory
from paceline.train.metrics import read_metrics
from paceline.train.servers.supervisor.finish import newest
from paceline.verify.server_replay import verify_replay
from tests.train.servers.runs import gap, serial, sets, started

COLOCATED = "{deployment: colocated, workers: 2, replication: 2, shards: 4}"
GROUPS = "deployment: groups, workers: 4, groups: 2, shards: 4"
STEPS = 20


def learns(out: Path) -> None:
    """The loss of the steps falls, and that of held-out data is well below that of a guess, ln 3."""
    rows = read_metrics(out / "metrics.jsonl")
    losses = [row["loss"] for row in rows]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    assert read_metrics(out / "metrics.jsonl", "validation")[-1]["loss"] < 0.8


def test_a_server_beside_every_worker(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, *sets(server=COLOCATED, train__steps=STEPS)) as run:
        assert run.finish() == 0, run.said
    assert "samples/s" in run.said and "tokens/s" not in run.said
    learns(out)
    assert gap(out, serial(out / "config.yaml", STEPS)) < 1e-9
    report = verify_replay(out)
    assert report.equal, report.text
    events = map(json.loads, (out / "exchange" / "events.jsonl").read_text().splitlines())
    joined = {(event["role"], event["id"]) for event in events if event["event"] == "joined"}
    logs = {path.stem: path.read_text() for path in (out / "logs").iterdir()}
    assert set(logs) == {"supervisor", "coordinator", *(f"{role}-{number}" for role, number in joined)}
    assert all(f"{role} {number}" in logs[f"{role}-{number}"] for role, number in joined)


def test_a_worker_that_dies_with_the_server_beside_it_is_replaced_with_one(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, *sets(server=COLOCATED, train__steps=4000), sleep_s=0.005) as run:
        run.until(lambda: run.steps() >= 3)

        def replaced(gone: dict[str, int]) -> bool:
            there = run.members()
            return all(len(pids) == 2 and gone.get(role) not in pids for role, pids in there.items())

        gone = {role: min(pids) for role, pids in run.members().items()}  # started one after the other
        for role in ("worker", "server"):
            os.kill(gone[role], signal.SIGKILL)
        run.until(lambda: replaced(gone))
        worker = max(run.members()["worker"])
        gone = {"server": max(run.members()["server"])}  # beside it, which lives on, and has another now
        os.kill(gone["server"], signal.SIGKILL)
        run.until(lambda: replaced(gone))
        os.kill(worker, signal.SIGKILL)
        gone = {"worker": worker, "server": max(run.members()["server"])}  # that other one leaves with it
        run.until(lambda: replaced(gone))
        done = run.steps()
        run.until(lambda: run.steps() >= done + 3)
        run.process.send(signal.SIGTERM)
        assert run.finish() == 143, run.said
    assert gap_of_snapshot(out) < 1e-9
    report = verify_replay(out)
    assert report.equal, report.text


def gap_of_snapshot(out: Path) -> float:
    directory = Directory(out / "exchange")
    found = newest(directory, directory.read().job).dense
    expected = serial(out / "config.yaml", len(read_metrics(out / "metrics.jsonl")))
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def test_groups_that_meet_only_at_the_end_are_averaged(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, *sets(server=f"{{{GROUPS}, sync_every: 1000}}", train__steps=STEPS)) as run:
        assert run.finish() == 0, run.said
    alone = [serial(out / "config.yaml", STEPS, first, 2) for first in (0, 2)]
    assert gap(out, {name: (value + alone[1][name]) / 2 for name, value in alone[0].items()}) < 1e-9


def test_groups_meet(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, *sets(server=f"{{{GROUPS}, sync_every: 5}}", train__steps=STEPS)) as run:
        assert run.finish() == 0, run.said
    learns(out)
    for group, first in enumerate((0, 2)):
        directory = Directory(out / "groups" / str(group))
        alone = serial(out / "config.yaml", STEPS, first, 2)
        assert gap(out, alone) > 1e-3
        held = newest(directory, directory.read().job).dense
        assert max(float((held[name] - value).abs().max()) for name, value in alone.items()) > 1e-3
        assert (out / "logs" / f"bridge-{group}.log").read_text().count("met after step") == 3
