"""The training loop: steps of micro-batches, validation, checkpoints, and nothing else.

It sees a parallel module through its public interface and does not know how it is split; it writes and prints nothing
itself (see `callbacks`). All ranks run it alike.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import CheckpointError, DataError, NonFiniteError
from paceline.train.callbacks import (
    Callback,
    CheckpointReport,
    EndReport,
    StartReport,
    StepReport,
    ValidationReport,
)
from paceline.train.memory import peak_memory
from paceline.train.optim import load_schedule_state, schedule_state
from paceline.train.stop import StopRequest

if TYPE_CHECKING:
    from paceline.runtime.module import ParallelModule
    from paceline.train.checkpoint import Checkpointer
    from paceline.train.data import Loader, MicroBatch, Step


@dataclass(frozen=True)
class FitSettings:
    """How long to train and what to do on the way.

    Attributes:
        steps: optimizer steps of the whole run, those before a resume included.
        seed: every random operation of step s, micro-batch m draws from (seed, s, m) alone.
        clip: largest global norm of the gradient, or None for no clipping.
        validate_every: steps between passes over the validation data; 0 for one at the end only.
        checkpoint_every: steps between checkpoints; 0 for one at the end only.
        equal_weights: all micro-batches count alike, whatever their losses are means over.
    """

    steps: int
    seed: int = 0
    clip: float | None = None
    validate_every: int = 0
    checkpoint_every: int = 0
    equal_weights: bool = False


class Trainer:
    """Trains a parallel module on the steps of a loader.

    Args:
        module: from `paceline.parallelize`.
        optimizer: over the parameters of `module`.
        loader: yields the steps, over all epochs; its position is part of a checkpoint.
        settings: see there.
        schedule: stepped once after every optimizer step.
        validation: returns the validation data anew, as micro-batches.
        metrics: returns further figures of the validation data, by name. Collective.
        checkpoints: where to save, or None.
        callbacks: told of every event, in this order.
    """

    def __init__(
        self,
        module: ParallelModule,
        optimizer: Optimizer,
        loader: Loader,
        settings: FitSettings,
        *,
        schedule: LRScheduler | None = None,
        validation: Callable[[], Iterable[MicroBatch]] | None = None,
        metrics: Callable[[], Mapping[str, float]] | None = None,
        checkpoints: Checkpointer | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.loader = loader
        self.settings = settings
        self.schedule = schedule
        self.validation = validation
        self.metrics = metrics
        self.checkpoints = checkpoints
        self.callbacks = callbacks
        self.step = 0
        self._saved: int | None = None
        self._parts: dict[str, float] = {}
        self._peak = 0
        self._device = next(module.parameters()).device

    def fit(self) -> EndReport:
        """Train to the last step, or to the step in which a stop is asked for; validate and save at the end.

        Raises:
            NonFiniteError: a loss or gradient became NaN or infinite. The parameters are those before that step.
            DataError: the loader ended before the last step.
        """
        began = time.monotonic()
        try:
            self._tell(Callback.on_start, StartReport(self.step, self.settings.steps, self._size()))
            with StopRequest(self._device) as stop:
                signal = self._run(stop)
                self._save()
                if self.checkpoints is not None:
                    self.checkpoints.wait()
            report = EndReport(self.step, self.settings.steps, signal, time.monotonic() - began)
            self._tell(Callback.on_end, report)
            return report
        finally:
            self.loader.close()
            for callback in self.callbacks:
                callback.close()

    def _run(self, stop: StopRequest) -> int | None:
        """Do the steps that are left; return the signal that ended them early, if one did."""
        settings = self.settings
        steps = iter(self.loader)
        self.module.train()
        while self.step < settings.steps:
            stop.begin_vote()
            for report in self._advance(steps):
                self._tell(Callback.on_step, report)
            last = self.step == settings.steps
            signal = stop.end_vote()
            if signal is not None and not last:
                return signal
            if last or _due(self.step, settings.validate_every):
                self.validate()
            if not last and _due(self.step, settings.checkpoint_every):
                self._save()
        return None

    def _advance(self, steps: Iterator[Step]) -> list[StepReport]:
        """Do the next step, or the next few where they cannot be told apart, and report each."""
        began = time.monotonic()
        micro_batches = self._next(steps)
        self._parts = {"data": time.monotonic() - began}
        loss, norm, weight, rate = self.train_step(micro_batches)
        return [self._report(self.step, loss, norm, weight, rate, time.monotonic() - began)]

    def _next(self, steps: Iterator[Step]) -> Sequence[MicroBatch]:
        """Return the micro-batches of the next step."""
        try:
            return next(steps).micro_batches
        except StopIteration:
            raise DataError(
                f"the data ended after step {self.step} of {self.settings.steps}; let the loader repeat its epochs, or "
                f"ask for {self.step} steps."
            ) from None

    def _report(
        self, step: int, loss: float, norm: float | None, weight: float, rate: float, seconds: float
    ) -> StepReport:
        peak = self._peak = max(self._peak, peak_memory(self._device))  # somebody may let it begin anew
        return StepReport(step, self.settings.steps, loss, rate, norm, weight, seconds, peak, dict(self._parts))

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float, float, float]:
        """Do one optimizer step; return loss, gradient norm, weight of the loss and learning rate.

        Raises:
            NonFiniteError: see `fit`; raised on all ranks alike, before the optimizer has changed anything.
        """
        began = time.monotonic()
        loss, weight = self._accumulate(micro_batches)
        passed = time.monotonic()
        clip = self.settings.clip if self.settings.clip is not None else math.inf
        norm = float(self.module.clip_grad_norm_(clip)) if weight > 0 else math.nan
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteError(self._explain(micro_batches, loss, norm, weight))
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        passes = self.module.pass_seconds or {"passes": passed - began}
        self._parts |= {**passes, "update": time.monotonic() - passed}
        return loss, norm, weight, rate

    def _accumulate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Leave the gradient of the mean loss over all micro-batches together; return that loss and its weight."""
        seeds = [derived_seed(self.settings.seed, self.step, index) for index in range(len(micro_batches))]
        return self.module.accumulate(micro_batches, seeds, equal=self.settings.equal_weights)

    def validate(self) -> ValidationReport | None:
        """Return the mean loss over the validation data, in eval mode, and tell the callbacks."""
        if self.validation is None:
            return None
        began = time.monotonic()
        self.module.eval()
        with torch.no_grad():
            loss, total = self.module.mean_loss(self.validation(), equal=self.settings.equal_weights)
        self.module.train()
        if total == 0:
            raise DataError("the validation data holds nothing that a loss could be computed of.")
        metrics = self.metrics() if self.metrics is not None else {}
        report = ValidationReport(self.step, loss, total, time.monotonic() - began, metrics)
        self._tell(Callback.on_validate, report)
        return report

    def _save(self) -> None:
        if self.checkpoints is None or self._saved == self.step:
            return
        began = time.monotonic()
        self.checkpoints.save(self.step, self.state_dict())
        self._saved = self.step
        report = CheckpointReport(self.step, self.checkpoints.directory, time.monotonic() - began)
        self._tell(Callback.on_checkpoint, report)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds beside module and optimizer: step, position in the data, schedule, seed."""
        return {
            "step": self.step,
            "seed": self.settings.seed,
            "loader": self.loader.state_dict(),
            "schedule": schedule_state(self.schedule) if self.schedule is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.step = self._saved = int(state["step"])
        self.loader.load_state_dict(state["loader"])
        if self.schedule is not None and state["schedule"] is not None:
            load_schedule_state(self.schedule, state["schedule"])

    def resume(self) -> None:
        """Go on from the newest whole checkpoint. Collective.

        Raises:
            CheckpointError: there is none, or it does not fit.
        """
        if self.checkpoints is None:
            raise CheckpointError("this trainer has no checkpoints to resume from; give it a Checkpointer.")
        self.load_state_dict(self.checkpoints.restore())

    def _explain(self, micro_batches: Sequence[MicroBatch], loss: float, norm: float, weight: float) -> str:
        step = self.step + 1
        what = f"the loss of step {step} is {loss if not math.isfinite(loss) else 'finite'}"
        if weight == 0:
            return f"{what}: no micro-batch of this step holds a single valid token. Look at the data."
        # Clipping by a norm that is not finite has spoilt all gradients: compute them once more.
        self.optimizer.zero_grad(set_to_none=True)
        self._accumulate(micro_batches)
        name = self._first_non_finite()
        self.optimizer.zero_grad(set_to_none=True)
        if name is not None:
            where = f"the first parameter with a NaN or infinite gradient is '{name}'"
        else:
            where = f"every single gradient is finite; their norm is {norm}"
        return (
            f"{what}; {where}. The optimizer has not used this gradient, and checkpoints up to step {self.step} are "
            "whole. Try a lower learning rate, a longer warmup, or clipping, and resume."
        )

    def _first_non_finite(self) -> str | None:
        """Name the first parameter, in the module's order, whose gradient is not finite on some rank. Collective."""
        shards = [shard for shard in self.module.shards() if shard.is_parameter]
        names = list(dict.fromkeys(shard.name for shard in shards))
        bad = (names.index(s.name) for s in shards if s.tensor.grad is not None and not _finite(s.tensor.grad))
        first = torch.tensor([min(bad, default=len(names))], device=self._device)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(first, op=dist.ReduceOp.MIN)
        index = int(first.item())
        return names[index] if index < len(names) else None

    def _size(self) -> int:
        sizes = {s.name: math.prod(s.shape) for s in self.module.shards() if s.is_parameter}
        return sum(sizes.values())

    def _tell(self, event: Callable[[Callback, Any], None], report: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event.__name__)(report)


def derived_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return a seed from 0 to 2**63 - 1 that depends on all three and on nothing else."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, step, micro_batch), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
