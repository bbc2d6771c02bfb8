"""Whole runs as `paceline train` starts them, for tests: a recipe of a few seconds, and a hand on its processes."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.membership.observer import Observer
from paceline.train.metrics import read_metrics
from paceline.train.optim import build_schedule
from paceline.train.recipe import load_recipe
from paceline.train.servers.worker.parts import open_sources
from paceline.train.servers.worker.samples import TaskSamples
from paceline.verify.server_replay import verify_replay
from tests.forked import Forked
from tests.train.servers.toys import Net

TOYS = Path(__file__).with_name("toys.py")
PATIENCE_S = 300
"""Only a run that hangs takes so long, however busy the machine is."""
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

    def __init__(self, out: Path, process: Forked, output: Path) -> None:
        self.out, self.process = out, process
        self._output = output
        self.said = ""

    def finish(self) -> int:
        code = self.process.wait(PATIENCE_S)
        if code is None:
            pytest.fail(f"it did not end:\n{self.stacks()}")
        self.said = self._output.read_text()
        return code

    def stacks(self) -> str:
        """Have its processes write where they are; return their logs."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        logs = sorted((self.out / "logs").glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)

    def members(self) -> dict[str, list[int]]:
        """Process numbers by role, those first that were started first, once the coordinator answers."""
        found: dict[str, list[int]] = {"server": [], "worker": []}

        def asked() -> bool:
            directory = Directory(self.out / "exchange")
            with suppress(ExchangeError):
                observer = Observer.connect(directory.read(), directory.read_secret())
                try:
                    there = observer.status()["members"]
                finally:
                    observer.close()
                for member in sorted(there, key=lambda member: started_at(member["pid"])):
                    found[member["role"]].append(member["pid"])
                return True
            return False

        self.until(asked)
        return found

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert self.process.poll() is None, self.finish() or self.said
            assert time.monotonic() < deadline, self.stacks()
            time.sleep(0.05)

    def steps(self) -> int:
        file = self.out / "metrics.jsonl"
        return len(read_metrics(file)) if file.exists() else 0


def started_at(pid: int) -> tuple[float, int]:
    """When a process was started; numbers alone do not tell, as they begin anew at their end."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).create_time(), pid
    return 0.0, pid


@contextmanager
def started(out: Path, *arguments: str, recipe: dict[str, object] | Path = RECIPE, sleep_s: float = 0) -> Iterator[Run]:
    if isinstance(recipe, Path):
        path = recipe
    else:
        path = out.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(recipe))
    output = out.with_suffix(".said")
    output.write_bytes(b"")
    process = paceline("train", path, "--out", out, *arguments, output=output, TOY_SLEEP_S=str(sleep_s))
    mine = psutil.Process(process.pid)
    try:
        yield Run(out, process, output)
    finally:
        left = mine.children(recursive=True) if process.poll() is None else []
        process.kill()
        _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
        assert not alive


def paceline(*arguments: object, output: Path, **environment: str) -> Forked:
    """Begin what the command line would."""
    return Forked("paceline.cli.main", *arguments, output=output, OMP_NUM_THREADS="1", **environment)


def sets(**values: object) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def serial(config: Path, steps: int, first: int = 0, group: int | None = None) -> dict[str, Tensor]:
    """What the recipe's module comes to without servers; or on `group` pieces of each step from `first` on."""
    recipe = load_recipe(config)
    assert recipe.server is not None
    source, _ = open_sources(recipe)
    torch.manual_seed(recipe.seed)
    module = Net(16).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    schedule = build_schedule(optimizer, recipe.schedule.name, steps=steps, options=recipe.schedule.options)
    pieces = recipe.server.tasks_of_a_step
    samples = TaskSamples(source, 16, pieces, seed=recipe.seed)
    for step in range(steps):
        optimizer.zero_grad()
        numbers = range(first, first + (group or pieces))
        found = [part for number in numbers for part in samples.portions(step * pieces + number)]
        total = sum(part.samples for part in found)
        for part in found:
            (module(**part.batch) * (part.samples / total)).backward()
        if total:
            nn.utils.clip_grad_norm_(module.parameters(), recipe.train.clip or math.inf)
            optimizer.step()
        schedule.step()
    return module.state_dict()


def gap(out: Path, expected: dict[str, Tensor]) -> float:
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def proved(out: Path) -> list[str]:
    """The parts of a run that a replay has come to, bit for bit."""
    report = verify_replay(out)
    assert report.equal, report.text
    return [part.part.name for part in report.parts if part.outcome is not None]
