"""Training on an asynchronous pipeline: steps flow into each other, and drain where parameters are looked at.

Between validations and checkpoints the pipeline does not drain, for up to a few dozen steps. Each stage updates its
parameters itself, so there is no gradient of the whole module that could be clipped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import NonFiniteError, PlanError
from paceline.runtime.pipeline.asynchronous import Log
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.train.callbacks import StepReport
from paceline.train.loop import Trainer, derived_seed

if TYPE_CHECKING:
    from paceline.train.data import Step

_MOST = 32
"""Steps that flow without draining at most; batches of all of them are held at a time."""


class AsynchronousTrainer(Trainer):
    """A trainer whose steps overlap.

    Args:
        record: is given the step before a few that flowed together, how many micro-batches a step had, and what the
            ranks here logged of them.
        given: as for `Trainer`; `module` has an asynchronous schedule.

    Raises:
        PlanError: gradients are to be clipped, or several pipeline ranks live in this process.
    """

    def __init__(self, *given: Any, record: Callable[[int, int, Log], None], **options: Any) -> None:
        super().__init__(*given, **options)
        assert isinstance(self.module, PipelinedModule)
        self._pipeline = self.module
        self._record = record
        if self.settings.clip is not None:
            raise PlanError(
                "an asynchronous schedule has no gradient of the whole module at any time, so there is no norm to clip "
                "(train.clip): leave it out, or take a synchronous schedule such as 1f1b."
            )
        if len(self._pipeline.here) > 1:
            raise PlanError(
                "with all ranks in one process an optimizer would update all stages at once: train an asynchronous "
                "schedule on processes (launch: processes)."
            )

    def _advance(self, steps: Iterator[Step]) -> list[StepReport]:
        """Let the next few steps flow."""
        began = time.monotonic()
        first = self.step
        batches = [self._next(steps) for _ in range(self._together())]
        seeds = [
            [derived_seed(self.settings.seed, first + number, index) for index in range(len(batch))]
            for number, batch in enumerate(batches)
        ]
        updates = self._pipeline.updates(len(batches[0]))
        rates: list[float] = []

        def update(_stage: int, version: int) -> None:
            rates.append(float(self.optimizer.param_groups[0]["lr"]))
            self.optimizer.step()
            if self.schedule is not None and version % updates == 0:
                self.schedule.step()

        result = self._pipeline.train_batches(batches, seeds, update, equal=self.settings.equal_weights)
        self._record(first, len(batches[0]), result.log)
        seconds = (time.monotonic() - began) / len(batches)
        reports = []
        for number, (loss, weight) in enumerate(result.batches):
            self.step += 1
            if not math.isfinite(loss):
                raise NonFiniteError(
                    f"the loss of step {self.step} is {loss}. Stages have used gradients of it already, so the "
                    "parameters are spoilt; checkpoints before it are whole. Try a lower learning rate or a longer "
                    "warmup, and resume."
                )
            rate = rates[number * updates]
            reports.append(self._report(self.step, loss, None, weight, rate, seconds))
        return reports

    def _together(self) -> int:
        """How many steps flow without draining: to the next one after which parameters are looked at."""
        settings = self.settings
        ends = [settings.steps, self.step + _MOST]
        ends += [
            (self.step // every + 1) * every for every in (settings.validate_every, settings.checkpoint_every) if every
        ]
        return min(ends) - self.step


class VersionLog:
    """Writes which versions of its weights each stage read, a JSON line for each update.

    Args:
        file: of one rank.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, step: int, micro_batches: int, log: Log) -> None:
        """Write what was logged of steps after `step`; versions and micro-batches count from 0 there."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as out:
            for made in log:
                line = {"after_step": step, "micro_batches": micro_batches, **made._asdict()}
                out.write(json.dumps(line) + "\n")
