"""What a step in virtual time comes to, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.plan import Plan
from paceline.simulator.placed.memory import Peak
from paceline.trace import Event


@dataclass(frozen=True)
class RankTold:
    """What a step comes to for one rank, or for several that are alike.

    Attributes:
        ranks: who they are.
        compute_s: in which it computes the passes of its micro-batches.
        exposed_s: in which it waits for collectives or messages, by axis.
        bubble_s: in which it has nothing to do, in a pipeline.
        update_s: from the end of the passes: the gradient's norm and the optimizer's update.
        launch_s: in which a device waits for its host to start a call.
        handed_bytes: of the tensors that it hands over, by axis.
        peak: of its memory, over the first steps.
    """

    ranks: tuple[int, ...]
    compute_s: float
    exposed_s: Mapping[str, float]
    bubble_s: float
    update_s: float
    launch_s: float
    handed_bytes: Mapping[str, int]
    peak: Peak


@dataclass(frozen=True)
class Simulation:
    """A step in virtual time.

    Attributes:
        plan: what was simulated.
        step_s: seconds from the first call to the end of the last rank's update.
        micro_batches: of a step.
        ranks: one entry for ranks that are alike.
        source: who says how long calls and collectives take.
        events: what the watched ranks did.
        phases: seconds of the parts of a step, on rank 0.
    """

    plan: Plan
    step_s: float
    micro_batches: int
    ranks: tuple[RankTold, ...]
    source: str = ""
    events: tuple[Event, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> Peak:
        """That of the rank that needs most memory."""
        return max((told.peak for told in self.ranks), key=lambda peak: peak.bytes)
