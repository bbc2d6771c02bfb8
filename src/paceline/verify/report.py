"""What a verification found: for people, and as JSON with keys that stay."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.runtime.job.world import ONE_PROCESS, Backend
from paceline.verify.compare import Difference, Kind
from paceline.verify.locate import FirstDifference
from paceline.verify.precision import Precision
from paceline.verify.traffic import Volume

_WORST = 8


@dataclass(frozen=True)
class Flow:
    """How micro-batches flowed through the stages of a pipeline, and what they were sent as."""

    schedule: str
    micro_batches: int
    wire: str

    def __str__(self) -> str:
        """`schedule 1f1b: 8 micro-batches`; what is rounded on the way is said."""
        many = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        rounded = "" if self.wire == "exact" else f", sent as {self.wire}: rounded, so not equal to serial"
        return f"schedule {self.schedule}: {many}{rounded}"


@dataclass(frozen=True)
class Report:
    """The result of comparing a plan with the unmodified module run serially.

    Attributes:
        mesh: the plan's mesh, as text; `ranks` of them ran as `launch` says, with `backend` between them.
        steps: optimizer steps that were run.
        serial, parallel: losses of each step; parallel ones as rank 0 has them.
        differences: of the plan from its serial reference, the worst first.
        eager: of the captured program from the unmodified module, the worst first.
        forward, backward: collectives of one step on each rank, by kind.
        unknown_operators: operators without a rule, which every rank computes whole.
        pipeline: how micro-batches flowed; None where there are no stages.
        replayed: the plan is asynchronous, and compared with a serial replay of its log; `serial` are its losses.
        exact: the plan must equal it bit by bit.
        first: the first difference along the program; None when there is none, or none in one process.
    """

    precision: Precision
    mesh: str
    ranks: int
    launch: str
    backend: Backend
    zero_stage: int
    steps: int
    serial: tuple[float, ...]
    parallel: tuple[float, ...]
    differences: tuple[Difference, ...]
    eager: tuple[Difference, ...]
    forward: dict[str, Volume]
    backward: dict[str, Volume]
    unknown_operators: tuple[str, ...] = ()
    pipeline: Flow | None = None
    replayed: bool = False
    exact: bool = False
    first: FirstDifference | None = None

    @property
    def tolerance(self) -> float:
        """The largest relative error of a plan that counts as equal."""
        return 0.0 if self.exact else self.precision.parallel.rel_error

    @property
    def plan_equal(self) -> bool:
        """Whether the plan equals its serial reference."""
        return self.differences[0].rel_error <= self.tolerance

    @property
    def program_equal(self) -> bool:
        """Whether the captured program equals the unmodified module."""
        return self.eager[0].rel_error <= self.precision.eager.rel_error

    @property
    def equal(self) -> bool:
        """The verdict; both must hold."""
        return self.plan_equal and self.program_equal

    def to_json(self) -> dict[str, Any]:
        """Return one JSON object; its keys are documented in `docs/verify.md`."""
        return {
            "equal": self.equal,
            "dtype": self.precision.value,
            "tolerance": self.tolerance,
            "compared_with": self._reference,
            "mesh": self.mesh,
            "ranks": self.ranks,
            "launch": self.launch,
            "backend": self.backend.name,
            "between_ranks": self.backend.words,
            "zero_stage": self.zero_stage,
            "pipeline": None if self.pipeline is None else asdict(self.pipeline),
            "steps": self.steps,
            "loss": {"serial": self.serial[0], "parallel": _finite(self.parallel[0])},
            "losses": {"serial": list(self.serial), "parallel": list(map(_finite, self.parallel))},
            "worst": _entry(self.differences[0]),
            "worst_by_kind": {
                kind.value: _entry(found)
                for kind in Kind
                if (found := next((item for item in self.differences if item.kind is kind), None)) is not None
            },
            "compared": len(self.differences),
            "eager": {**_entry(self.eager[0]), "tolerance": self.precision.eager.rel_error},
            "collectives": {
                "forward": {kind: asdict(volume) for kind, volume in self.forward.items()},
                "backward": {kind: asdict(volume) for kind, volume in self.backward.items()},
            },
            "operators_without_rule": list(self.unknown_operators),
            "first_difference": None if self.first is None else _location(self.first),
        }

    def print(self, console: Console) -> None:
        """Print the worst few by name, the traffic and the verdict."""
        console.print(
            f"mesh {self.mesh}: {self.ranks} rank{'s' * (self.ranks > 1)} ({self.launch}), {self.precision.value}, "
            f"{self.steps} step{'s' * (self.steps > 1)}",
            highlight=False,
        )
        if self.pipeline is not None:
            console.print(str(self.pipeline), highlight=False)
        if self.backend != ONE_PROCESS:
            console.print(f"between ranks: {self.backend.words}", highlight=False, markup=False, soft_wrap=True)
        console.print(
            f"the worst of {len(self.differences)} comparisons with {self._reference} "
            f"({'bit by bit' if self.exact else f'tolerance {self.tolerance:.0e}'}):",
            highlight=False,
        )
        console.print(self._table())
        worst = self.eager[0]
        console.print(
            f"captured program against the unmodified module: {worst.rel_error:.1e} ({worst.kind.value} {worst.name}; "
            f"tolerance {self.precision.eager.rel_error:.0e})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        for name, volumes in (("forward", self.forward), ("backward", self.backward)):
            text = ", ".join(f"{v.count} {kind} ({_megabytes(v.bytes)})" for kind, v in volumes.items())
            console.print(f"collectives {name:<9}{text or 'none'}", highlight=False)
        console.print(self._verdict(), style="bold green" if self.equal else "bold red", markup=False, soft_wrap=True)
        if not self.plan_equal:
            console.print(self._where(), highlight=False, markup=False, soft_wrap=True)

    @property
    def _reference(self) -> str:
        return "serial replay" if self.replayed else "serial"

    def _table(self) -> Table:
        tolerance = self.tolerance
        table = Table()
        table.add_column("what")
        table.add_column("name", overflow="fold")
        table.add_column("relative error", justify="right")
        for item in self.differences[:_WORST]:
            style = None if item.rel_error <= tolerance else "red"
            table.add_row(item.kind.value, item.name, f"{item.rel_error:.1e}", style=style)
        return table

    def _verdict(self) -> str:
        loss = f"loss {self.parallel[0]:.10g}, {self._reference} {self.serial[0]:.10g}"
        if self.equal:
            return f"EQUAL: {loss}"
        if self.plan_equal:
            return f"NOT EQUAL: the captured program is not the module that was given; {loss}"
        return f"NOT EQUAL: {loss}"

    def _where(self) -> str:
        if self.first is not None:
            return f"first difference along the program: {self.first}"
        return (
            "With all ranks in one process, in float64, every tensor along the program agrees: what differs comes from "
            "the processes themselves or from rounding. Compare with --launch inprocess and --dtype float64."
        )


def _entry(item: Difference) -> dict[str, Any]:
    return {"name": item.name, "kind": item.kind.value, "rel_error": _finite(item.rel_error)}


def _location(first: FirstDifference) -> dict[str, Any]:
    values = asdict(first)
    return {**values, "placements": dict(first.placements), "rel_error": _finite(first.rel_error)}


def _finite(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e5 else f"{count / 1e3:.3g} kB"
