"""What `paceline bench models` finds: one model on one mesh in one type, compared with the serial module.

All ranks run in one process. The meshes of a model share its capture and its serial training. A mesh with stages is
named with a schedule (`pp=2 zb-v`); its batch flows in micro-batches of unequal sizes.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from paceline.bench.families import family_of
from paceline.errors import PacelineError, PlacementError, PlanError
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.schedule import Kind
from paceline.verify.precision import Precision
from paceline.verify.report import Report
from paceline.verify.run import Comparison, Launch
from paceline.verify.subject import Subject
from paceline.verify.traffic import Volume

_STEPS = 2
_MICRO_BATCHES = 3  # which a batch of 4 samples does not divide into


class Verdict(StrEnum):
    """How a comparison ended."""

    EQUAL = "equal"
    DIFFERS = "differs"
    REFUSED = "refused"
    FAILS = "fails"


@dataclass(frozen=True)
class Task:
    """The meshes on which one process compares one model in one type."""

    model: str
    dtype: str
    meshes: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One model on one mesh in one type.

    Attributes:
        worst: the largest relative error of the plan; None where there is nothing to compare or it is not finite.
        of: what has it, such as `gradient head.weight`.
        collectives: of a step, forward and backward, by kind.
        operators: those without a rule, which every rank computes whole.
        reason: why it is not equal; empty where it is.
        seconds: that the placement, the ranks' training and the comparison took.
    """

    model: str
    mesh: str
    dtype: str
    verdict: Verdict
    worst: float | None = None
    of: str = ""
    collectives: tuple[tuple[str, Volume], ...] = ()
    operators: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        """What a rank hands to collectives in a step."""
        return sum(volume.bytes for _, volume in self.collectives)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        collectives = {kind: asdict(volume) for kind, volume in self.collectives}
        return {**asdict(self), "collectives": collectives, "operators": list(self.operators)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Cell:
        """Read what `to_json` returned."""
        collectives = tuple((kind, Volume(**volume)) for kind, volume in values["collectives"].items())
        read = {"verdict": Verdict(values["verdict"]), "operators": tuple(values["operators"])}
        return cls(**{**values, **read, "collectives": collectives})


def mesh_of(name: str) -> Mesh:
    """Return the mesh of a cell, whatever the schedule of its stages."""
    return Mesh.parse(name.partition(" ")[0])


def run(task: Task) -> list[Cell]:
    """Compare on each mesh of a task, in a process of its own."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # what is wrong is in the cells
    return list(compare(task))


def compare(task: Task) -> Iterator[Cell]:
    """Yield the cell of each mesh."""
    subject = Subject(family_of(task.model).factory, precision=Precision(task.dtype))
    with tempfile.TemporaryDirectory(prefix="paceline-models-") as directory:
        comparison = Comparison(subject, _STEPS, Path(directory))
        for mesh in task.meshes:
            began = time.perf_counter()
            found = _compared(comparison, mesh)
            yield Cell(task.model, mesh, task.dtype, **found, seconds=round(time.perf_counter() - began, 2))


def _compared(comparison: Comparison, mesh: str) -> dict[str, Any]:
    """Return what one comparison says about a cell."""
    try:
        report = comparison.report(_plan(mesh), Launch.INPROCESS)
    except (PlanError, PlacementError) as error:
        return {"verdict": Verdict.REFUSED, "reason": _first_line(error)}
    except Exception as error:  # whatever goes wrong with one model is a line of the table, and the others go on
        told = isinstance(error, PacelineError)
        return {
            "verdict": Verdict.FAILS,
            "reason": _first_line(error) if told else f"{type(error).__name__}: {_first_line(error)}",
        }
    worst = report.differences[0] if not report.plan_equal or report.program_equal else report.eager[0]
    return {
        "verdict": Verdict.EQUAL if report.equal else Verdict.DIFFERS,
        "worst": worst.rel_error if worst.rel_error < float("inf") else None,
        "of": f"{worst.kind.value} {worst.name}",
        "collectives": _together(report),
        "operators": report.unknown_operators,
        "reason": _difference(report),
    }


def _plan(name: str) -> Plan:
    mesh, schedule = mesh_of(name), name.partition(" ")[2]
    if not schedule:
        return Plan(mesh)
    chunks = 2 if schedule == Kind.INTERLEAVED.value else 1
    return Plan(mesh, pipeline=PipelinePlan(schedule, _MICRO_BATCHES, chunks))


def _difference(report: Report) -> str:
    if report.equal:
        return ""
    if not report.program_equal:
        return "the captured program is not the module"
    return f"first difference: {report.first}" if report.first else "no tensor along the program differs in float64"


def _together(report: Report) -> tuple[tuple[str, Volume], ...]:
    """Add up the two passes."""
    found: dict[str, Volume] = {}
    for volumes in (report.forward, report.backward):
        for kind, volume in volumes.items():
            before = found.get(kind, Volume())
            found[kind] = Volume(before.count + volume.count, before.bytes + volume.bytes)
    return tuple(sorted(found.items()))


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).strip().splitlines() or [""]
    return lines[0]
