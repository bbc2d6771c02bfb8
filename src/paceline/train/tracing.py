"""Traces of real steps, in the names that `paceline simulate --trace` uses."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from paceline.runtime.interface import ParallelModule
from paceline.runtime.module import PlacedModule
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.trace import UPDATE, Recorder, noting, write
from paceline.train.callbacks import Callback, StartReport, StepReport


class TraceFile(Callback):
    """Notes what this rank does in some steps, and writes it down after each. Other steps cost nothing.

    Args:
        file: where to.
        module: whose steps are noted; one under a fallback notes its updates only.
        optimizer: whose updates are.
        steps: which, counted from 1.
    """

    def __init__(self, file: Path, module: ParallelModule, optimizer: Optimizer, steps: Collection[int]) -> None:
        self._file = file
        self._module = module
        self._optimizer = optimizer
        self._steps = frozenset(steps)
        self._recorder: Recorder | None = None
        self._hooks: list[Any] = []

    def on_start(self, report: StartReport) -> None:
        """Begin, if the first step is to be noted."""
        self._before(report.step + 1)

    def on_step(self, report: StepReport) -> None:
        """Write what was noted; begin anew, if the next step is to be noted."""
        if self._recorder is not None and report.step in self._steps:
            write(self._recorder.events, self._file)
        self._before(report.step + 1)

    def _before(self, step: int) -> None:
        if step not in self._steps:
            self._listen(None)
            return
        self._recorder = self._recorder or Recorder(self._module.ranks[0])
        if not self._hooks:
            self._listen(self._recorder)

    def _listen(self, recorder: Recorder | None) -> None:
        if isinstance(self._module, (PlacedModule, PipelinedModule)):
            self._module.recorder = recorder
        while self._hooks:
            self._hooks.pop().remove()
        if recorder is None:
            return
        update: list[Any] = []

        def begin(*_: Any) -> None:
            update.append(noting(recorder, UPDATE))
            update[-1].__enter__()

        def end(*_: Any) -> None:
            update.pop().__exit__(None, None, None)

        self._hooks = [
            self._optimizer.register_step_pre_hook(begin),
            self._optimizer.register_step_post_hook(end),
        ]
