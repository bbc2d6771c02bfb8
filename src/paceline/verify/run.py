"""`paceline verify`: a plan against the unmodified module run serially.

In float32 and bfloat16 the plan is compared with the module itself. In float64 it is compared with the captured
program, both lifted to float64 throughout: many modules compute parts in float32, and would hide what a plan does wrong
below that. In every type, the captured program is compared with the module.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from paceline.errors import RecipeError, nearest
from paceline.placement.fitting import check_batch
from paceline.plan import Mesh, Pin, PipelinePlan, Plan, Recompute
from paceline.program.build import Factory, batch_size
from paceline.program.capture import Batch, capture
from paceline.program.precision import lift
from paceline.program.program import Program
from paceline.runtime.job.backend import Choice
from paceline.runtime.job.launch import launch as launch_ranks
from paceline.runtime.pipeline.pieces import count_for
from paceline.runtime.pipeline.scheduling import Schedules
from paceline.verify import asynchronous
from paceline.verify.compare import Difference, Key, differences, gaps
from paceline.verify.division import Programs, division_for, weight_of
from paceline.verify.locate import FirstDifference, first_difference
from paceline.verify.precision import Precision
from paceline.verify.ranks import REFERENCE, START, Finding, Job, find_in_process, finding_file, trained_file
from paceline.verify.report import Flow, Report
from paceline.verify.serial import Division, Trajectory, run_eager, run_program, undivided
from paceline.verify.subject import Subject, batches, save_start

_E = TypeVar("_E", bound=Enum)
_ENTRY = "paceline.verify.ranks:run_rank"


class Launch(Enum):
    """Where the ranks run: a process each, or all in this one."""

    PROCESSES = "processes"
    INPROCESS = "inprocess"


def verify(
    factory: str | Factory,
    mesh: str | Mesh,
    *,
    arguments: Mapping[str, Any] | None = None,
    steps: int = 2,
    dtype: str = "float64",
    launch: str = "processes",
    backend: str = "auto",
    zero_stage: int = Plan.zero_stage,
    pins: tuple[Pin, ...] = (),
    pipeline: PipelinePlan = Plan.pipeline,
    recompute: str = Plan.recompute.value,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compare a plan with the unmodified module, run serially from the same weights on the same samples.

    Compared are the losses of all steps, every parameter's gradient of the first, and every buffer and parameter after
    the last, each piece on each rank. `docs/verify.md` says how, and within what.

    Args:
        factory: what makes (module, batch), or its name: `package.module:callable` or `path/to/file.py:callable`.
        mesh: such as `dp=2,fsdp=2`.
        arguments: keyword arguments of the factory.
        steps: optimizer steps.
        dtype: `float64`, `float32`, or `bfloat16` for autocast.
        launch: `processes`, or `inprocess` for all ranks in this one.
        backend: what carries tensors between processes: `shm`, `gloo` or `auto`.
        zero_stage: see `Plan`.
        pins: see `Plan`.
        pipeline: how micro-batches flow, where the mesh has the axis `pp`.
        recompute: `none`, `attention` or `blocks`; see `Plan`.
        tell: is told what is being done, in a few words.

    Raises:
        RecipeError: the factory or an option cannot be used.
        LaunchError: ranks could not be started, or not with this backend.
        CaptureError: the module fails in this type, or cannot be captured.
        PlanError: the batch cannot be divided over the mesh; the message says what could.
        NonFiniteError: the serial run gives no numbers to compare with.
    """
    if steps < 1:
        raise RecipeError(f"steps is {steps}; compare after at least 1 step.")
    how = _choice(Launch, launch, "launch")
    choice = Choice.parse(backend)
    subject = Subject(factory, dict(arguments or {}), _choice(Precision, dtype, "dtype"))
    parsed = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    again = Recompute.of(recompute)
    plan = Plan(parsed, zero_stage=zero_stage, pins=pins, pipeline=pipeline, recompute=again)
    if how is Launch.PROCESSES:
        subject = replace(subject, factory=_name_of(factory))
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as directory:
        return Comparison(subject, steps, Path(directory), tell).report(plan, how, choice)


class Comparison:
    """A module, and the plans that are compared with it one after the other; it is captured and trained serially once.

    What the sides share is in files of `directory`.
    """

    def __init__(
        self, subject: Subject, steps: int, directory: Path, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._subject = subject
        self._steps = steps
        self._directory = directory
        self._tell = tell
        self._references: dict[tuple[int, int] | None, _Serial] = {}

    def report(self, plan: Plan, launch: Launch, backend: Choice = Choice.AUTO) -> Report:
        """Train by a plan and compare; for the errors, see `verify`."""
        _, batch = self._start
        size = batch_size(batch)
        assert size is not None
        check_batch(size, plan.mesh.inner)
        if plan.mesh.stage_ranks > 1 and Schedules(plan.pipeline, plan.mesh.stage_ranks).is_asynchronous:
            return self._replayed(plan, launch, backend)
        serial, precision = self._serial(plan), self._subject.precision
        self._tell(f"training by the plan on {plan.mesh.size} ranks")
        findings = self._findings(serial, plan, launch, backend)
        found = differences(_worst_of(findings), serial.reference, precision.parallel.floor)
        report = self._report(plan, launch, serial, findings, serial.reference.losses, found)
        if report.plan_equal:
            return report
        self._tell("looking for the first difference along the program")
        return replace(report, first=self.located(plan))

    def located(self, plan: Plan) -> FirstDifference | None:
        """Return where a plan first differs from the captured program, or None where one process shows nothing."""
        serial, inner = self._serial(plan), plan.with_(mesh=plan.mesh.inner)
        return first_difference(serial.program, serial.module, serial.batch, inner)

    def _replayed(self, plan: Plan, launch: Launch, backend: Choice) -> Report:
        """Train by an asynchronous plan, and compare with a serial replay of what its ranks logged."""
        serial, precision = self._train_serially(undivided), self._subject.precision
        self._tell(f"training by the plan on {plan.mesh.size} ranks")
        findings = self._findings(serial, plan, launch, backend)
        self._tell("replaying serially what the ranks logged")
        processes = 1 if launch is Launch.INPROCESS else plan.mesh.size
        job = self._job(serial, plan, backend)
        trained = [asynchronous.Trained.load(trained_file(job, rank)) for rank in range(processes)]
        module, programs = self._programs
        if precision is Precision.FLOAT64:
            captured = programs
            programs = Programs(lambda piece: lift(captured(piece)))
        replayed = asynchronous.replay(
            programs,
            module,
            list(batches(serial.batch, self._steps)),
            plan,
            trained,
            serial.eager.rate,
            lambda piece: weight_of(programs(piece), module, piece),
        )
        found = asynchronous.gaps_from(self._directory / asynchronous.FINAL, findings[0].losses, replayed)
        told = differences(found, replayed, precision.parallel.floor)
        report = self._report(plan, launch, serial, findings, replayed.losses, told)
        return replace(report, replayed=True, exact=plan.mesh.inner.size == 1)

    def _report(
        self,
        plan: Plan,
        launch: Launch,
        serial: _Serial,
        findings: list[Finding],
        losses: tuple[float, ...],
        found: tuple[Difference, ...],
    ) -> Report:
        """What is told of a plan, given the losses it was compared with and how all else differs."""
        precision = self._subject.precision
        first = findings[0]
        return Report(
            precision=precision,
            mesh=str(plan.mesh),
            ranks=plan.mesh.size,
            launch=launch.value,
            backend=first.backend,
            zero_stage=plan.zero_stage,
            steps=self._steps,
            serial=losses,
            parallel=first.losses,
            differences=found,
            eager=differences(gaps(serial.eager, serial.captured), serial.eager, precision.eager.floor),
            forward=first.forward,
            backward=first.backward,
            unknown_operators=first.unknown_operators,
            pipeline=_words(plan, serial.batch),
        )

    @cached_property
    def _start(self) -> tuple[nn.Module, Batch]:
        """The module and the batch whose tensors all sides start from."""
        module, batch = self._subject.build()
        save_start(module, batch, self._directory / START)
        return module, batch

    @cached_property
    def _programs(self) -> tuple[nn.Module, Programs]:
        """A fresh module, as every rank has it, and its programs: an eager run may leave more behind than tensors."""
        module, _ = self._subject.build(self._directory / START)
        return module, Programs(lambda batch: capture(module, batch, autocast=self._subject.precision.autocast))

    def _serial(self, plan: Plan) -> _Serial:
        """The serial sides that a plan is compared with."""
        module, programs = self._programs
        _, batch = self._start
        divide = division_for(plan, programs, module, batch)
        key = None if divide is undivided else (count_for(batch, plan, plan.mesh.batch_parts), plan.mesh.batch_parts)
        if key not in self._references:
            self._references[key] = self._train_serially(divide)
        found = self._references[key]
        found.reference.save(self._directory / REFERENCE)
        return found

    def _train_serially(self, divide: Division) -> _Serial:
        precision = self._subject.precision
        module, programs = self._programs
        self._tell("training the unmodified module serially")
        unmodified, batch = self._subject.build(self._directory / START)
        eager = run_eager(unmodified, batches(batch, self._steps), precision, divide)
        self._tell("capturing it, and training the captured program serially")
        captured = run_program(programs, module, batches(batch, self._steps), eager.rate, divide)
        reference, program = eager, programs(batch)
        if precision is Precision.FLOAT64:
            lifted = Programs(lambda piece: lift(programs(piece)))
            program = lifted(batch)
            reference = run_program(lifted, module, batches(batch, self._steps), eager.rate, divide)
        return _Serial(module, batch, program, eager, captured, reference)

    def _findings(self, serial: _Serial, plan: Plan, launch: Launch, backend: Choice) -> list[Finding]:
        """Return what every process found."""
        job = self._job(serial, plan, backend)
        if launch is Launch.INPROCESS:
            return [find_in_process(job, serial.program)]
        ranks = plan.mesh.size
        launch_ranks(_ENTRY, job.to_json(), ranks)
        return [Finding.load(finding_file(job, rank)) for rank in range(ranks)]

    def _job(self, serial: _Serial, plan: Plan, backend: Choice) -> Job:
        reference = serial.reference
        return Job(self._subject, plan, self._steps, reference.rate, reference.losses, self._directory, backend.value)


@dataclass(frozen=True)
class _Serial:
    """The serial sides of a comparison.

    Attributes:
        module, batch: from which `program` was captured, and whose tensors are as at the start.
        program: what plans place, lifted where the comparison is in float64.
        eager, captured: the unmodified module and the captured program, not lifted.
        reference: what plans are compared with.
    """

    module: nn.Module
    batch: Batch
    program: Program
    eager: Trajectory
    captured: Trajectory
    reference: Trajectory


def _words(plan: Plan, batch: Batch) -> Flow | None:
    if plan.mesh.stage_ranks == 1:
        return None
    return Flow(plan.pipeline.schedule, count_for(batch, plan, plan.mesh.batch_parts), plan.pipeline.wire)


def _worst_of(findings: list[Finding]) -> dict[Key, float]:
    keys = dict.fromkeys(key for finding in findings for key in finding.gaps)
    return {key: max(finding.gaps.get(key, 0.0) for finding in findings) for key in keys}


def _choice(kind: type[_E], value: str, name: str) -> _E:
    allowed = [item.value for item in kind]
    if value not in allowed:
        raise RecipeError(f"{name} is '{value}'; choose one of {', '.join(allowed)}.{nearest(value, allowed)}")
    return kind(value)


def _name_of(factory: str | Factory) -> str:
    """Return the name by which other processes find a factory."""
    if isinstance(factory, str):
        return factory
    module, name = factory.__module__, factory.__qualname__
    if module == "__main__":
        module = getattr(sys.modules["__main__"], "__file__", None) or "<stdin>"
    if "<" in name or "<" in module:
        raise RecipeError(
            f"processes cannot find the factory '{name}': define it at the top level of a file, name it as "
            "'path/to/file.py:callable', or verify with launch='inprocess'."
        )
    return f"{module}:{name}"
