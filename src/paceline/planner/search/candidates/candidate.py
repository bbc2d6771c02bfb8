"""One layout with what a step of it takes, holds, sends and costs, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.plan import Recompute as Policy
from paceline.planner.search.question import AXES, Question
from paceline.simulator.closed_form.estimates import Estimates, Footprint
from paceline.simulator.layouts import SCHEDULES, Layouts
from paceline.simulator.workload import Numbers, Recompute

_POLICIES = {
    Recompute.NONE: Policy.NONE,
    Recompute.SELECTIVE: Policy.ATTENTION,
    Recompute.FULL: Policy.BLOCKS,
}


@dataclass(frozen=True)
class Candidate:
    """One layout.

    Attributes:
        layout: it alone.
        memory: bytes of the rank that needs most, by kind.
        limit_bytes: what a rank may hold.
        step_s: seconds of a step.
        spread: standard deviation of its logarithm.
        compute_s, bubble_s, optimizer_s, constant_s: parts of the step.
        exposed_s: communication that nothing runs beside, by axis.
        link_bytes: sent by one rank in a step, by level of the network.
        flops: of the model for the whole batch.
        tokens: of a step.
        peak: floating-point operations per second of a device.
        price: dollars for an hour of a device, where it is known.
    """

    layout: Layouts
    memory: Mapping[str, float]
    limit_bytes: float
    step_s: float
    spread: float
    compute_s: float
    bubble_s: float
    optimizer_s: float
    constant_s: float
    exposed_s: Mapping[str, float]
    link_bytes: Mapping[str, float]
    flops: float
    tokens: float
    peak: float
    price: float | None

    def number(self, name: str) -> int:
        """Return a field of its layout."""
        return int(getattr(self.layout, name)[0])

    @cached_property
    def mesh(self) -> Mesh:
        """Axes of several ranks, outermost first."""
        return mesh_of(self.layout)

    @property
    def devices(self) -> int:
        """Ranks."""
        return int(self.layout.devices[0])

    @property
    def schedule(self) -> str | None:
        """Of its pipeline, where it has one."""
        return SCHEDULES[self.number("schedule")] if self.number("pp") > 1 else None

    @property
    def recompute(self) -> Recompute:
        """What is computed again."""
        return Recompute(self.number("recompute"))

    @property
    def policy(self) -> Policy:
        """The same, as plans name it."""
        return _POLICIES[self.recompute]

    @property
    def memory_bytes(self) -> float:
        """Of the rank that needs most."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether it fits into memory."""
        return self.memory_bytes <= self.limit_bytes

    @property
    def risk_s(self) -> float:
        """What it is ranked by: seconds of a step that turns out slower by one standard deviation."""
        return float(self.step_s * np.exp(self.spread))

    @property
    def step_s_error(self) -> float:
        """Seconds by which a step may well be slower."""
        return self.risk_s - self.step_s

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing runs beside."""
        return sum(self.exposed_s.values())

    @property
    def bubble(self) -> float:
        """Share of the step that a rank waits in its pipeline."""
        return self.bubble_s / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Of all devices."""
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float:
        """Operations of the model, over what the devices could do in that time."""
        return self.flops / (self.step_s * self.devices * self.peak)

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """What a million tokens cost; None where the price of a device is unknown."""
        if self.price is None:
            return None
        return self.price * self.devices * self.step_s / 3600 / self.tokens * 1e6

    @property
    def is_executable(self) -> bool:
        """Whether the runtime runs it: it has no optimizer state that is split by itself, and no server."""
        return self.number("zero") != 1 and not self.number("server")

    def plan(self, base: Plan | None = None) -> Plan:
        """Return the plan that executes it.

        Regions are what the solver finds where memory is limited, so they set its limit.

        Args:
            base: what to take all else from; its pins are about other axes, and left out.
        """
        return (base or Plan()).with_(
            mesh=self.mesh,
            zero_stage=self.number("zero") or Plan.zero_stage,
            memory_bytes=int(self.limit_bytes) if self.number("regions") else None,
            recompute=self.policy,
            pins=(),
            pipeline=PipelinePlan(
                schedule=self.schedule or PipelinePlan.schedule,
                micro_batches=self.number("micro_batches") if self.schedule else None,
                chunks=self.number("chunks") if self.schedule == "interleaved" else 1,
            ),
        )


def mesh_of(layout: Layouts) -> Mesh:
    """Return the mesh of one layout."""
    sizes = ((axis.value, int(getattr(layout, axis.value)[0])) for axis in AXES)
    return Mesh(tuple((name, size) for name, size in sizes if size > 1))


def candidates(asked: Question, layouts: Layouts, needs: Footprint, times: Estimates) -> list[Candidate]:
    """Return each layout with all that is known of it."""
    count = len(layouts)
    kinds = {name: _each(getattr(needs, name), count) for name in vars(needs)}

    def single(index: int) -> Candidate:
        return Candidate(
            layout=layouts[index : index + 1],
            memory={name: float(values[index]) for name, values in kinds.items()},
            limit_bytes=asked.memory_bytes,
            step_s=float(times.step_s[index]),
            spread=float(_each(times.spread, count)[index]),
            compute_s=float(_each(times.compute_s, count)[index]),
            bubble_s=float(_each(times.bubble_s, count)[index]),
            optimizer_s=float(_each(times.optimizer_s, count)[index]),
            constant_s=float(_each(times.constant_s, count)[index]),
            exposed_s={axis: float(_each(values, count)[index]) for axis, values in times.exposed_s.items()},
            link_bytes={level: float(_each(values, count)[index]) for level, values in times.link_bytes.items()},
            flops=float(_each(times.flops, count)[index]),
            tokens=asked.tokens,
            peak=asked.peak,
            price=asked.cluster.price_per_device_hour,
        )

    return [single(index) for index in range(count)]


def _each(values: Numbers, count: int) -> Numbers:
    return np.broadcast_to(np.asarray(values, dtype=np.float64), (count,))
