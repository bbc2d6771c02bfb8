"""What a run was predicted to take, beside what it took: made before the first step, told after the last one.

Made of calls that were timed on this machine and collectives that were measured between ranks like these, kept beside
cached programs; what is not known yet is timed at the start, within a budget of seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.optim import Optimizer

from paceline.program.capture import Batch
from paceline.runtime.figures import known_costs
from paceline.runtime.interface import ParallelModule
from paceline.runtime.link_times import known_collectives
from paceline.runtime.module import PlacedModule
from paceline.runtime.operator_times import timed_operators
from paceline.runtime.peers import Peers
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.program_cache import default_directory
from paceline.simulator.placed.measured import KINDS_ALONG, graphs_of, peak_here, simulated, times_here
from paceline.simulator.placed.simulation import Simulation
from paceline.simulator.placed.step import Circumstances
from paceline.train.callbacks import Callback, CheckpointReport, EndReport, StepReport, ValidationReport
from paceline.train.rundir import write_whole
from paceline.train.step_memory import StepMemory

T = TypeVar("T")
_log = logging.getLogger(__name__)
_BUDGET_S = 4.0
_UNLIKE = 2
"""So many steps at the start are unlike the others: memory is new, and libraries load."""


@dataclass(frozen=True)
class Prediction:
    """A step as it was predicted, for the rank that needs most.

    Attributes:
        step_s: seconds, without the data.
        parts: seconds of its parts, as far as they follow each other.
        exchange_s: seconds within them in which a rank waits for others, by axis.
        memory_bytes: the peak of tensors.
        peak_at: where that is.
        handed_bytes: what a rank hands over in a step, by axis.
        missing: calls that were not timed, for which a rough figure stands.
    """

    step_s: float
    parts: Mapping[str, float]
    exchange_s: Mapping[str, float]
    memory_bytes: int
    peak_at: str
    handed_bytes: Mapping[str, int]
    missing: int


def why_not(module: ParallelModule) -> str | None:
    """Return why nothing can be predicted of a module's steps; None where it can."""
    if not isinstance(module, (PlacedModule, PipelinedModule)):
        return "the module runs under a fallback, which has no placed program"
    if module.plan.compile:
        return "compiled graphs are timed as a whole only"
    if len(module.ranks) > 1:
        return "all ranks share one process"
    if default_directory() is None:
        return "PACELINE_CACHE is off, so there are no figures of this machine"
    return None


def prediction_of(module: ParallelModule, batch: Batch, given: Circumstances) -> tuple[Prediction | None, str | None]:
    """Return the prediction, which rank 0 has, or on all ranks why there is none; a collective.

    No run ends for want of a prediction: what a rank does by itself may fail, and then all go without. Timing what is
    not known takes a few seconds.

    Args:
        module: that is trained.
        batch: an example of a micro-batch, over all ranks.
        given: what a step depends on beside.
    """
    reason = why_not(module)
    if reason is not None:
        return None, reason
    peers = module.peers
    device, directory = peers.devices[0], default_directory()
    graphs, error = _tried(lambda: graphs_of(module, batch, given))
    reason = _agreed(peers, error)
    if reason is not None or graphs is None:
        return None, reason
    timed = timed_operators(graphs, device, directory, budget_s=_BUDGET_S, ranks=module.mesh.size)
    collectives = known_collectives(peers, module.mesh, directory, kinds=KINDS_ALONG)

    def made() -> Prediction | None:
        if not peers.leads:
            return None
        times = times_here(timed, collectives, known_costs(device, directory), peers)
        found = simulated(module, batch, times, given)
        return _told(found, peak_here(module, found, times), len(times.operators.missing))  # type: ignore[attr-defined]  # ours

    prediction, error = _tried(made)
    reason = _agreed(peers, error)
    return (prediction, None) if reason is None else (None, reason)


def _tried(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what is made, or what was wrong."""
    try:
        return make(), None
    except Exception as error:  # whatever it is: a prediction is not worth a run
        _log.warning("no prediction of a step", exc_info=error)
        return None, error


def _agreed(peers: Peers, error: Exception | None) -> str | None:
    """Return why there is no prediction: on every rank, if on any, so that all go on alike. A collective."""
    failed = torch.tensor([error is not None], dtype=torch.int32, device=peers.devices[0])
    if not peers.alone:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed.item():
        return None
    return "another rank could not tell; its log says why" if error is None else f"{type(error).__name__}: {error}"


def _told(simulation: Simulation, peak: int, missing: int) -> Prediction:
    phases = simulation.phases
    parts = {name: phases[name] for name in ("forward", "backward", "passes") if name in phases}
    if "passes" in parts:  # of a pipeline, which hands its gradients over at their end
        parts["passes"] += phases.get("gradients", 0.0)
    rest = simulation.step_s - sum(parts.values())
    most = max(simulation.ranks, key=lambda rank: rank.peak.bytes)
    first = simulation.ranks[0]
    return Prediction(
        step_s=simulation.step_s,
        parts={**parts, "update": rest},
        exchange_s=dict(first.exposed_s),
        memory_bytes=peak,
        peak_at=" ".join(filter(None, (most.peak.phase, most.peak.module, most.peak.operator))),
        handed_bytes=dict(first.handed_bytes),
        missing=missing,
    )


class PredictionTable(Callback):
    """Tells at the end how a run compared with its prediction, and writes it down.

    Args:
        prediction: of rank 0; others have none.
        reason: why there is none.
        module: that is trained.
        optimizer: of its parameters.
        handed_bytes: what ranks hand over in a step, by axis, counted in the graphs that run.
        file: where the comparison goes, on rank 0; None on others.
        console: where the table goes.
    """

    def __init__(
        self,
        prediction: Prediction | None,
        reason: str | None,
        module: ParallelModule,
        optimizer: Optimizer,
        handed_bytes: Mapping[str, int],
        file: Path | None,
        console: Console,
    ) -> None:
        self._prediction = prediction
        self._reason = reason
        self._module = module
        self._handed_bytes = handed_bytes
        self._file = file
        self._console = console
        self._steps: list[StepReport] = []
        self._memory = StepMemory(module, optimizer)

    def on_step(self, report: StepReport) -> None:
        """Remember it."""
        self._steps.append(report)
        if self._reason is None and len(self._steps) >= _UNLIKE:
            self._memory.after_step()

    def on_validate(self, report: ValidationReport) -> None:
        """What validation takes is nothing of a step."""
        self._memory.begin_anew()

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Nor is what saving takes."""
        self._memory.begin_anew()

    def on_end(self, report: EndReport) -> None:
        """Compare."""
        steps = self._steps[_UNLIKE:] or self._steps
        if self._reason is not None or not steps:
            if self._file is not None and self._reason is not None:
                self._console.print(f"no prediction of a step: {self._reason}", highlight=False, markup=False)
            return
        peak = self._memory.most()
        if self._prediction is None or self._file is None:
            return
        found = compared(self._prediction, steps, peak, self._handed_bytes)
        write_whole(self._file, json.dumps(found, indent=2) + "\n")
        self._console.print(table_of(found))
        if found["differs_most"]:
            self._console.print(f"largest difference: {found['differs_most']}", highlight=False, markup=False)


def compared(
    prediction: Prediction, steps: list[StepReport], peak: int | None, handed_bytes: Mapping[str, int]
) -> dict[str, Any]:
    """Return what was predicted beside what was measured, as JSON values; seconds are medians over steps."""
    names = list(dict.fromkeys(name for step in steps for name in step.parts))
    measured = {name: median([step.parts.get(name, 0.0) for step in steps]) for name in names}
    parts = {
        name: {"predicted": prediction.parts.get(name), "measured": measured.get(name)} for name in prediction.parts
    }
    if "passes" in measured and "passes" not in parts:  # the two passes cannot be told apart, or are not one each
        parts = {"passes": {"predicted": sum(prediction.parts.values()), "measured": measured["passes"]}, **parts}
    parts["data"] = {"predicted": 0.0, "measured": measured.get("data", 0.0)}
    differences = {
        name: part["predicted"] - part["measured"]
        for name, part in parts.items()
        if part["predicted"] is not None and part["measured"] is not None
    }
    most = max(differences, key=lambda name: abs(differences[name]), default=None)
    words = None
    if most is not None:
        which = "less" if differences[most] < 0 else "more"
        words = f"{most}, {abs(differences[most]) * 1e3:.1f} ms {which} than it took"
    return {
        "step_s": {"predicted": prediction.step_s, "measured": median([step.seconds for step in steps])},
        "parts": parts,
        "exchange_s": dict(prediction.exchange_s),
        "memory_bytes": {"predicted": prediction.memory_bytes, "measured": peak},
        "peak_at": prediction.peak_at,
        "handed_bytes": {
            axis: {"predicted": count, "measured": handed_bytes.get(axis)}
            for axis, count in prediction.handed_bytes.items()
        },
        "differs_most": words,
        "steps": len(steps),
        "prediction": asdict(prediction),
    }


def table_of(found: Mapping[str, Any]) -> Table:
    """Return the comparison as a table."""
    table = Table("A step", "Predicted", "Measured", "Difference", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("step", *_row(found["step_s"], 1e3, "ms"))
    for name, part in found["parts"].items():
        table.add_row(f"  {name}", *_row(part, 1e3, "ms"))
    for axis, seconds in found["exchange_s"].items():
        table.add_row(f"  of which waiting along {axis}", f"{seconds * 1e3:.1f} ms", "", "")
    table.add_row("memory of a rank's tensors", *_row(found["memory_bytes"], 2.0**-20, "MiB"))
    for axis, part in found["handed_bytes"].items():
        table.add_row(f"handed over along {axis}", *_row(part, 2.0**-20, "MiB"))
    return table


def _row(values: Mapping[str, float | None], scale: float, unit: str) -> tuple[str, str, str]:
    predicted, measured = values["predicted"], values["measured"]
    shown = [f"{value * scale:.1f} {unit}" if value is not None else "-" for value in (predicted, measured)]
    difference = f"{predicted / measured - 1:+.1%}" if predicted and measured else ""
    return shown[0], shown[1], difference
