"""Whole runs with servers beside workers, and with servers for groups of workers."""

from __future__ import annotations

import json
import math
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.nn.functional import one_hot

from paceline.errors import ExchangeError, RecipeError
from paceline.exchange.directory import Directory
from paceline.exchange.shard.manifest import Manifest, whole_snapshots
from paceline.train.metrics import read_metrics
from paceline.train.recipe import load_recipe
from paceline.train.servers.groups.ledger import Ledger
from paceline.train.servers.supervisor.finish import newest
from paceline.train.servers.supervisor.supervise import supervise
from tests.train.servers.runs import RECIPE, TOYS, gap, proved, serial, sets, started

COLOCATED = "{deployment: colocated, workers: 2, replication: 2, shards: 4}"
RATE = 0.3
VOTES = {
    **RECIPE,
    "model": {"factory": f"{TOYS}:build_votes"},
    "data": {"source": "factory", "dataset": f"{TOYS}:pure", "validation": 0.1},
    "optimizer": {"name": "Adagrad", "lr": RATE},
    "checkpoint": {"every": 2},
}
GROUPS = "deployment: groups, workers: 4, groups: 2, shards: 4"
STEPS = 20


def learns(out: Path) -> None:
    """The loss of the steps falls, and that of held-out data is well below that of a guess, ln 3."""
    losses = losses_of(out)
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    assert read_metrics(out / "metrics.jsonl", "validation")[-1]["loss"] < 0.8


def losses_of(out: Path) -> list[float]:
    """Of all steps, of which none is missing."""
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def test_a_server_beside_every_worker(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, *sets(server=COLOCATED, train__steps=STEPS)) as run:
        assert run.finish() == 0, run.said
    assert "samples/s" in run.said and "tokens/s" not in run.said
    learns(out)
    resumed_at_its_end(out)
    assert gap(out, serial(out / "config.yaml", STEPS)) < 1e-9
    assert proved(out) == ["exchange"]
    events = map(json.loads, (out / "exchange" / "events.jsonl").read_text().splitlines())
    joined = {(event["role"], event["id"]) for event in events if event["event"] == "joined"}
    logs = {path.stem: path.read_text() for path in (out / "logs").iterdir()}
    assert set(logs) == {"supervisor", "coordinator", *(f"{role}-{number}" for role, number in joined)}
    assert all(f"{role} {number}" in logs[f"{role}-{number}"] for role, number in joined)


def resumed_at_its_end(out: Path) -> None:
    """A module that was not written is: no process is started for that. Where it is there, there is nothing to do."""
    recipe, model = load_recipe(out / "config.yaml"), out / "model.safetensors"
    with pytest.raises(RecipeError, match="has done all of its"):
        supervise(recipe, out, resume=True)
    model.unlink()
    model.mkdir()
    os.utime(model, (0, 0))
    with pytest.raises(ExchangeError, match=r"cannot write .*model\.safetensors.*--resume"):
        supervise(recipe, out, resume=True)
    model.rmdir()
    supervise(recipe, out, resume=True)
    assert not list(out.glob(".model*"))


def test_a_worker_that_dies_with_the_server_beside_it_is_replaced_with_one(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, *sets(server=COLOCATED, train__steps=4000), sleep_s=0.005) as run:
        run.until(lambda: run.steps() >= 3)

        def replaced(gone: dict[str, int]) -> bool:
            there = run.members()
            return all(len(pids) == 2 and gone.get(role) not in pids for role, pids in there.items())

        run.until(lambda: replaced({}))
        gone = {role: pids[0] for role, pids in run.members().items()}  # started together
        for role in ("worker", "server"):
            os.kill(gone[role], signal.SIGKILL)
        run.until(lambda: replaced(gone))
        worker = run.members()["worker"][-1]
        gone = {"server": run.members()["server"][-1]}  # beside it, which lives on, and has another now
        os.kill(gone["server"], signal.SIGKILL)
        run.until(lambda: replaced(gone))
        os.kill(worker, signal.SIGKILL)
        gone = {"worker": worker, "server": run.members()["server"][-1]}  # that other one leaves with it
        run.until(lambda: replaced(gone))
        done = run.steps()
        run.until(lambda: run.steps() >= done + 3)
        run.process.send(signal.SIGTERM)
        assert run.finish() == 143, run.said
    assert gap_of_snapshot(out) < 1e-9
    assert proved(out) == ["exchange"]


def gap_of_snapshot(out: Path) -> float:
    directory = Directory(out / "exchange")
    found = newest(directory, directory.read().job).dense
    expected = serial(out / "config.yaml", len(read_metrics(out / "metrics.jsonl")))
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def test_groups_that_meet_only_at_the_end_are_averaged_also_where_they_were_stopped(tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = sets(server=f"{{{GROUPS}, sync_every: 1000}}", train__steps=STEPS, train__clip=0.3)
    with started(out, *given, sleep_s=0.01) as run:
        run.until(lambda: run.steps() >= 3)
        run.process.send(signal.SIGTERM)
        assert run.finish() == 143, run.said
    with started(out, *given, "--resume") as run:
        assert run.finish() == 0, run.said
    learns(out)
    alone = [serial(out / "config.yaml", STEPS, first, 2) for first in (0, 2)]
    assert gap(out, {name: (value + alone[1][name]) / 2 for name, value in alone[0].items()}) < 1e-9
    assert proved(out) == ["exchange-before-1", "exchange"]


def votes_are_learnt(out: Path) -> None:
    """Nothing that `toys.Pure` teaches is ever taken back, and the first step of Adagrad is as long as its rate.

    So of every vote a group holds half of that rate at least once it has met, as has everybody from both groups, and
    all of it before. What a module makes of votes v is no worse than ln(1 + 2 exp(-6 v)), and never than a guess.
    """
    assert max(losses_of(out)) < loss_of(0) + 1e-9
    assert max(losses_of(out)[-4:]) < loss_of(RATE / 2)
    assert all(row["loss"] < loss_of(RATE / 2) for row in read_metrics(out / "metrics.jsonl", "validation"))
    learnt = load_file(out / "model.safetensors")
    keys, rows = learnt["words.weight.keys"], learnt["words.weight.rows"]
    assert keys.tolist() == [place * 1000 + label for place in range(3) for label in range(3)]
    is_own = one_hot(keys % 1000, 3) == 1
    assert rows[is_own].min() > RATE - 1e-6 and rows[~is_own].max() < 1e-6 - RATE
    assert learnt["weights"].min() > 1


def loss_of(vote: float) -> float:
    return math.log(1 + 2 * math.exp(-6 * vote))


def test_groups_with_tables_go_on_after_bridges_died_or_hung_and_then_everybody_was_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = sets(server=f"{{{GROUPS}, sync_every: 2, consistency: asp, tables: {{words.weight: ids}}}}")
    above = Directory(out / "exchange")
    groups = [Directory(above.root / "groups" / str(group)) for group in range(2)]

    def met() -> int:
        ledgers = [Ledger(group.root) for group in groups]
        return min(ledger.last().number if ledger.path.exists() else 0 for ledger in ledgers)

    def signalled(bridges: list[int]) -> bool:
        with suppress(ProcessLookupError):  # it was given up just now
            for bridge, number in zip(bridges, (signal.SIGKILL, signal.SIGSTOP), strict=True):
                os.kill(bridge, number)
            return True
        return False

    with started(out, *given, *sets(train__steps=100_000), recipe=VOTES, sleep_s=0.03) as run:
        run.until(lambda: met() >= 1)
        run.until(lambda: len(bridges := run.members()["worker"]) == 2 and signalled(bridges))
        run.until(lambda: met() >= 4 and len(whole_snapshots(above.snapshots)) > 1)
        run.process.kill()
        assert run.finish() < 0
    done = [Manifest.read(it.snapshot(whole_snapshots(it.snapshots)[-1])).first_task // 2 for it in groups]
    with started(out, *given, *sets(train__steps=max(done) + 10), "--resume", recipe=VOTES) as run:
        assert run.finish() == 0, run.said
    assert len(losses_of(out)) == max(done) + 10
    votes_are_learnt(out)
    assert all((out / "exchange-before-1" / "groups" / str(group) / "cuts").is_dir() for group in range(2))
    assert proved(out) == ["exchange-before-1", "exchange"]
    assert min(Ledger(group.root).last().base for group in groups) >= 2
