"""Whole runs as `paceline train` starts them: equal to serial, through deaths and restarts, and replayed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.membership.observer import Observer
from paceline.train.metrics import read_metrics
from paceline.train.recipe import load_recipe
from paceline.train.servers.parts import open_sources
from paceline.train.servers.samples import TaskSamples
from paceline.verify.server_replay import verify_replay
from tests.train.servers.toys import Net

TOYS = Path(__file__).with_name("toys.py")
PATIENCE_S = 120
RECIPE = {
    "name": "toy",
    "model": {"factory": f"{TOYS}:build"},
    "data": {"source": "factory", "dataset": f"{TOYS}:points", "validation": 0.1},
    "train": {"steps": 15, "batch": 16, "validate": {"every": 10}},
    "optimizer": {"name": "SGD", "lr": 0.2, "momentum": 0.9},
    "precision": "float64",
    "server": {"workers": 2},
}


class Run:
    """A run in the making."""

    def __init__(self, out: Path, process: subprocess.Popen[str]) -> None:
        self.out, self.process = out, process
        self.said = ""

    def finish(self) -> int:
        try:
            self.said = self.process.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end:\n{self.stacks()}")
        return self.process.returncode

    def stacks(self) -> str:
        """Have its processes write where they are; return their logs."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        logs = sorted((self.out / "logs").glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)

    def members(self) -> dict[str, list[int]]:
        """Process numbers by role, once the coordinator answers."""
        directory = Directory(self.out / "exchange")
        with suppress(ExchangeError):
            observer = Observer.connect(directory.read(), directory.read_secret())
            found: dict[str, list[int]] = {"server": [], "worker": []}
            for member in observer.status()["members"]:
                found[member["role"]].append(member["pid"])
            observer.close()
            return found
        return {"server": [], "worker": []}

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert self.process.poll() is None, self.finish() or self.said
            assert time.monotonic() < deadline, self.stacks()
            time.sleep(0.05)

    def steps(self) -> int:
        file = self.out / "metrics.jsonl"
        return len(read_metrics(file)) if file.exists() else 0


@contextmanager
def started(out: Path, *arguments: str, recipe: dict[str, object] | Path = RECIPE, sleep_s: float = 0) -> Iterator[Run]:
    if isinstance(recipe, Path):
        path = recipe
    else:
        path = out.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "paceline.cli.main", "train", str(path), "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOY_SLEEP_S": str(sleep_s)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    mine = psutil.Process(process.pid)
    try:
        yield Run(out, process)
    finally:
        left = mine.children(recursive=True) if process.poll() is None else []
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()
        _, alive = psutil.wait_procs(left, timeout=10)
        assert not alive


def sets(**values: object) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def serial(config: Path, steps: int) -> dict[str, Tensor]:
    """What the recipe's module comes to without servers."""
    recipe = load_recipe(config)
    source, _ = open_sources(recipe)
    torch.manual_seed(recipe.seed)
    module = Net(16).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    samples = TaskSamples(source, 16, 1, seed=recipe.seed)
    for step in range(steps):
        (portion,) = samples.portions(step)
        optimizer.zero_grad()
        module(**portion.batch).backward()
        optimizer.step()
    return module.state_dict()


def gap(out: Path, expected: dict[str, Tensor]) -> float:
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def test_stopped_and_resumed_a_synchronous_run_is_serial(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, *sets(train__steps=4000)) as run:
        run.until(lambda: run.steps() >= 3)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 143
        assert "saved it. To go on:" in run.said and "--resume" in run.said
    done = run.steps()
    with started(out, "--resume", *sets(train__steps=done + 12), recipe=out / "config.yaml") as run:
        assert run.finish() == 0, run.said
        assert "paceline verify --replay" in run.said
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, done + 13))
    assert gap(out, serial(out / "config.yaml", done + 12)) < 1e-9
    assert read_metrics(out / "metrics.jsonl", "validation")[-1]["step"] == done + 12
    report = verify_replay(out)
    assert report.equal, report.text


def test_an_asynchronous_run_outlives_deaths_and_is_replayed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = sets(
        server="{consistency: asp, servers: 2, replication: 2, shards: 4}",
        train="{steps: 9000, batch: 16}",
        optimizer="{name: Adagrad, lr: 0.05}",
    )
    with started(out, *given, sleep_s=0.005) as run:
        run.until(lambda: run.steps() >= 3)
        joining = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", "join", str(out), "worker"], stdout=subprocess.DEVNULL
        )
        victims = run.members()
        os.kill(victims["worker"][0], signal.SIGKILL)
        run.until(lambda: len(set(run.members()["worker"]) - {victims["worker"][0]}) >= 2)
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
            run.until(lambda: len(run.members()["worker"]) == 3)
        finally:
            joining.send_signal(signal.SIGTERM)
        assert joining.wait(PATIENCE_S) == 143
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.said
    report = verify_replay(out)
    assert report.equal, report.text
    members = [row["members"] for row in read_metrics(out / "metrics.jsonl", "members")]
    for kind, figure in (("server", "updates"), ("worker", "pushes")):
        assert any(v.get(figure, 0) > 0 for row in members for name, v in row.items() if name.startswith(kind))
    assert "the coordinator is back" in run.said and "is gone: its process ended" in run.said
    events = [json.loads(line) for line in (out / "exchange" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("recovered") == 1


def test_a_fault_of_the_program_ends_the_run_with_its_words(tmp_path: Path) -> None:
    with started(tmp_path / "run", *sets(data__dataset=f"{TOYS}:rotten")) as run:
        assert run.finish() == 1
    assert "sample 77 is rotten" in run.said
