"""What a run says beside its progress: how long each phase of the start took, and what to do next."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger

from rich.console import Console

from paceline.train.callbacks import Callback, EndReport, StartReport, StepReport
from paceline.train.recipe import Recipe
from paceline.train.rundir import RunDirectory


class Speaker:
    """Says things on the terminal (of rank 0) and in the log (of every rank)."""

    def __init__(self, console: Console, log: Logger) -> None:
        self.console = console
        self.log = log

    def say(self, text: str) -> None:
        """Say one or more lines."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self.log.info("%s", text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say how long the body took."""
        began = time.monotonic()
        yield
        self.say(f"{name:<22}{time.monotonic() - began:6.2f} s")


class FirstStep(Callback):
    """Says how long the first step took: it is longer than the others where something is compiled or warmed up."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._said = False

    def on_start(self, report: StartReport) -> None:
        """Say where the run begins, when that is not the beginning."""
        if report.step:
            self._speaker.say(f"resumed after step {report.step}")

    def on_step(self, report: StepReport) -> None:
        """Say it once."""
        if not self._said:
            self._said = True
            self._speaker.say(f"{'first step':<22}{report.seconds:6.2f} s")


def train_longer(recipe: Recipe, run: RunDirectory, report: EndReport) -> str:
    """Return the line of what to do next that has a finished run go on for as long again."""
    config, out = shlex.quote(str(run.config)), shlex.quote(str(run.root))
    epochs = recipe.train.epochs
    until = f"train.steps={2 * report.steps}" if epochs is None else f"train.epochs={2 * epochs}"
    return f"  train longer          paceline train {config} --out {out} --resume --set {until}"


def next_steps(recipe: Recipe, run: RunDirectory, report: EndReport, *, tensorboard: bool, placed: bool) -> str:
    """Return what the user may do with a finished run, as commands to copy.

    Args:
        recipe: of the run.
        run: its directory.
        report: how it ended.
        tensorboard: whether that is installed.
        placed: the module runs a placed program, which fits any mesh and equals serial, and no fallback.
    """
    config = shlex.quote(str(run.config))
    samples = recipe.train.batch // recipe.train.micro_batches
    others = [ranks for ranks in (recipe.mesh.size, 2) if ranks > 1 and samples % ranks == 0]
    lines = [
        f"step {report.step}, {report.seconds:.0f} s. Everything is in {run.root}: the model in {run.model.name}, "
        f"figures in {run.metrics.name}.",
        "",
        "What next:",
        train_longer(recipe, run, report),
    ]
    if placed and others:
        lines.append(f"  on another mesh       paceline train {config} --mesh fsdp={others[0]}")
    if placed:
        lines.append(f"  prove it is serial    paceline verify {config} --mesh {recipe.mesh}")
    if tensorboard:
        lines.append(f"  look at the curves    tensorboard --logdir {shlex.quote(str(run.tensorboard))}")
    return "\n".join(lines)


def resume_command(run: RunDirectory) -> str:
    """Return the command that goes on with a run."""
    return f"paceline train {shlex.quote(str(run.config))} --out {shlex.quote(str(run.root))} --resume"
