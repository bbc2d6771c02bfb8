"""What a supervisor tells its callbacks: steps and evaluations from workers' records, figures from the coordinator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from paceline.exchange.terms import Charter
from paceline.program.factory import load_factory
from paceline.train.callbacks import (
    Callback,
    CheckpointReport,
    EndReport,
    MembersReport,
    StartReport,
    ValidationReport,
)
from paceline.train.metrics import LogLines, MetricsFile, TensorBoard
from paceline.train.progress import progress as shown
from paceline.train.recipe import Recipe
from paceline.train.rundir import RunDirectory
from paceline.train.servers.recipe.rates import factors_of
from paceline.train.servers.rundir import work_before, work_of
from paceline.train.servers.watch.steps import Steps
from paceline.train.servers.watch.view import MembersLines, MembersView
from paceline.train.servers.worker.records import RecordReader
from paceline.train.servers.worker.samples import samples_of_step
from paceline.train.startup import FirstStep, Speaker


class Progress:
    """Tells callbacks how a run goes on.

    Args:
        recipe: of the run.
        run: its directory.
        charters: of its exchange, or of those of its groups.
        samples: of the training data.
        speaker: says things.
    """

    def __init__(
        self, recipe: Recipe, run: RunDirectory, charters: Sequence[Charter], samples: int, speaker: Speaker
    ) -> None:
        job, terms = charters[0].job, charters[0].terms
        assert recipe.server is not None
        self._every = recipe.server.average_every or 1
        self.total = terms.tasks // job.pieces * self._every
        self._firsts = [charter.job.clock(charter.terms.first_task) for charter in charters]
        first = min(self._firsts)
        grouped = recipe.server.deployment == "groups"
        pieces, factors = recipe.server.tasks_of_a_step, factors_of(recipe, self.total)
        rates = [recipe.optimizer.lr * factor for factor in factors] or [recipe.optimizer.lr] * self.total
        sizes = partial(samples_of_step, samples=samples, batch=recipe.train.batch)
        self.steps = Steps(pieces, self.total, self._every, rates, sizes, first, not grouped)
        groups: list[int | None] = list(range(recipe.server.groups)) if grouped else [None]
        self._records = RecordReader(work_of(run, 0, group).parent for group in groups)
        self._before = [RecordReader(work_before(run, group)) for group in groups]
        self._pieces = pieces
        self._callbacks = _callbacks(recipe, run, speaker)

    def start(self, report: StartReport) -> None:
        """The run begins."""
        for callback in self._callbacks:
            callback.on_start(report)
        for first, records in zip(self._firsts, self._before, strict=True):
            if first > min(self._firsts):  # what other groups do once more, this one had done
                tasks = (record for record in records.new() if "task" in record)
                self._take(record for record in tasks if int(record["task"]) // self._pieces < first)

    def take(self) -> None:
        """Tell what workers did since the last time."""
        self._take(self._records.new())

    def _take(self, records: Iterable[Mapping[str, Any]]) -> None:
        known = list(records)
        for report in self.steps.take(record for record in known if "task" in record):
            for callback in self._callbacks:
                callback.on_step(report)
        for record in known:
            if "evaluation" in record and record.get("weight"):
                loss = math.nan if record["loss"] is None else float(record["loss"])
                step = int(record["evaluation"]) * self._every
                found = ValidationReport(step, loss, record["weight"], record["seconds"], _numbers(record["metrics"]))
                for callback in self._callbacks:
                    callback.on_validate(found)

    def members(self, report: MembersReport) -> None:
        """Tell what servers and workers are doing."""
        for callback in self._callbacks:
            callback.on_members(report)

    def checkpoint(self, report: CheckpointReport) -> None:
        """A snapshot was written."""
        for callback in self._callbacks:
            callback.on_checkpoint(report)

    def end(self, report: EndReport) -> None:
        """The run ended in good order."""
        for callback in self._callbacks:
            callback.on_end(report)

    def close(self) -> None:
        """Release files and the terminal: all of them, also if the rest of a file cannot be written."""
        for records in (self._records, *self._before):
            records.close()
        with ExitStack() as stack:
            for callback in self._callbacks:
                stack.callback(callback.close)


def _numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def _callbacks(recipe: Recipe, run: RunDirectory, speaker: Speaker) -> Sequence[Callback]:
    console = speaker.console
    on_terminal = [MembersView(console)] if console.is_terminal else [shown(console), MembersLines(console)]
    return [
        LogLines(speaker.log, recipe.train.log_every),
        FirstStep(speaker),
        MetricsFile(run.metrics),
        TensorBoard(run.tensorboard, speaker.log),
        *on_terminal,
        *(load_factory(factory, Path.cwd())(run.root) for factory in recipe.callbacks),
    ]
