"""A micro-batch as a pipeline is planned for it: captured, and placed on the inner mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from paceline.placement.costs import Costs
from paceline.placement.place import PlacedProgram, place
from paceline.plan import Plan
from paceline.program.capture import Batch, capture
from paceline.runtime.figures import known_costs
from paceline.runtime.pipeline.pieces import count_for, micro_batches, samples_of
from paceline.runtime.planning import in_modes, training_modes
from paceline.runtime.program_cache import default_directory


@dataclass(frozen=True)
class Flow:
    """What flows through a pipeline.

    Attributes:
        module: called as `module(*batch)` or `module(**batch)`.
        batch: one micro-batch, over all ranks of the inner mesh.
        count: how many micro-batches there are.
        autocast: run the forward pass under autocast to this dtype.
        elsewhere: what operators and redistributions cost on another machine than this.
    """

    module: nn.Module
    batch: Batch
    count: int
    autocast: torch.dtype | None = None
    elsewhere: Costs | None = None

    @property
    def samples(self) -> int:
        """Of a micro-batch."""
        return samples_of(self.batch)

    @property
    def costs(self) -> Costs:
        """What is known of the machine it is planned for."""
        if self.elsewhere is not None:
            return self.elsewhere
        device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        return known_costs(device, default_directory())


def flow_of(module: nn.Module, batch: Batch, plan: Plan) -> Flow:
    """Return the first of the micro-batches in which a batch flows."""
    parts = plan.mesh.batch_parts
    pieces = micro_batches(batch, count_for(batch, plan, parts), parts)
    return Flow(module, pieces[0], len(pieces))


def placed_on_inner(flow: Flow, plan: Plan, tell: Callable[[str], None]) -> PlacedProgram:
    """Return the captured step of a micro-batch, placed as each stage will be.

    Raises:
        CaptureError, PlanError, PlacementError: as `planner.explain` does.
    """
    tell("capturing a micro-batch")
    with in_modes(flow.module, training_modes(flow.module)):
        program = capture(flow.module, flow.batch, autocast=flow.autocast)
    tell("placing it")
    return place(program, plan.with_(mesh=plan.mesh.inner), costs=flow.costs)
