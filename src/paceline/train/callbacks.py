"""What a training loop tells its callbacks: frozen reports, and the base class that receives them.

The loop itself prints and writes nothing; all reporting is callbacks. Reports are the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class StartReport:
    """A run that is about to do its first step.

    Attributes:
        step: steps already done, above 0 when the run was resumed.
        steps: where the run ends.
        parameters: number of elements of the user's module (not of this rank's shards).
    """

    step: int
    steps: int
    parameters: int


@dataclass(frozen=True)
class StepReport:
    """One optimizer step that is done.

    Attributes:
        step: number of this step, from 1.
        steps: where the run ends.
        loss: the serial loss of the global batch.
        learning_rate: of the first parameter group, as used in this step.
        grad_norm: global norm of the gradient before clipping; None where stages update at different times.
        weight: what the loss is a mean over: valid tokens, or samples, of the global batch.
        seconds: wall time of the step, with its data.
        peak_memory: bytes, the highest so far in this process (of the device if there is one).
        parts: seconds of its parts on this rank, as far as they can be told apart: `data`, `forward`, `backward` (or
            `passes`), `update`.
        unit: what `weight` counts: `samples` where it is known to be as many as these, else `tokens`.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    weight: float
    seconds: float
    peak_memory: int
    parts: Mapping[str, float] = field(default_factory=dict)
    unit: Literal["tokens", "samples"] = "tokens"

    @property
    def tokens_per_s(self) -> float:
        """Valid tokens (or samples) a second, over all ranks."""
        return self.weight / self.seconds if self.seconds > 0 else math.inf


@dataclass(frozen=True)
class ValidationReport:
    """The mean loss over the validation data after `step` steps; `weight` tokens (or samples) in `seconds`.

    Attributes:
        metrics: what `classification.Scorer` found, where the recipe asks for scores.
    """

    step: int
    loss: float
    weight: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        found = "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in self.metrics.items())
        return f"step {self.step}  validation loss {self.loss:.4f}{found}"


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint of `step` was handed over for saving; training stood still for `seconds`."""

    step: int
    directory: Path
    seconds: float


@dataclass(frozen=True)
class MembersReport:
    """What servers and workers were doing after `step` steps.

    Attributes:
        step: steps that are done.
        figures: of each, by its name (`server-0`, `worker-3`): plain values, and counts by bucket under `staleness`.
    """

    step: int
    figures: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class EndReport:
    """A run that ended without an error.

    Attributes:
        step: steps done.
        steps: where the run was to end.
        signal: number of the signal that asked it to stop early, or None.
        seconds: wall time since its start.
    """

    step: int
    steps: int
    signal: int | None
    seconds: float


class Callback:
    """Does nothing at every event; derive and override what you need. Called on every rank, in order."""

    def on_start(self, report: StartReport) -> None:
        """Before the first step."""

    def on_step(self, report: StepReport) -> None:
        """After every optimizer step."""

    def on_validate(self, report: ValidationReport) -> None:
        """After every pass over the validation data."""

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """After every checkpoint was handed over for saving."""

    def on_members(self, report: MembersReport) -> None:
        """Every few seconds of a run whose parameters are on servers."""

    def on_end(self, report: EndReport) -> None:
        """After the last step, or when a signal ended the run early. Not called when an error ends it."""

    def close(self) -> None:
        """At the very end, also after an error: release files and the terminal."""
