"""What is searched: a workload on some devices of a cluster, and what plans may do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError, nearest
from paceline.plan import Axis
from paceline.simulator.workload import Workload

AXES = (Axis.PP, Axis.DP, Axis.FSDP, Axis.SP, Axis.HW, Axis.TP)
"""That a search may use, in the order of a mesh: outermost first."""


@dataclass(frozen=True)
class Question:
    """A workload, a cluster, and what is allowed.

    Attributes:
        devices: ranks of every plan.
        batch: samples of a step.
        memory_bytes: what a rank may hold.
        axes: that a plan may split along.
    """

    workload: Workload
    cluster: Cluster
    devices: int
    batch: int
    memory_bytes: float
    axes: frozenset[Axis]

    @property
    def tokens(self) -> float:
        """Tokens of a step, or samples where they have none."""
        return self.batch * float(np.max(self.workload.tokens))

    @property
    def peak(self) -> float:
        """Floating-point operations per second of one device, in the type of the workload."""
        peaks = self.cluster.slowest.device.peak
        return peaks.get(self.workload.precision.dtype, max(peaks.values()))

    @property
    def layers(self) -> int:
        """Blocks that stages of a pipeline can share."""
        return int(sum(np.max(block.count) for block in self.workload.blocks if block.repeats))

    @property
    def node(self) -> int:
        """Devices behind the fastest links: those of the innermost level."""
        innermost = self.cluster.levels[0].devices
        return self.cluster.devices if innermost is None else innermost

    @property
    def alone(self) -> Question:
        """Return what to show pure strategies for: as many samples for each device as here, on one node if need be."""
        if self.batch % self.devices == 0:
            return self
        ranks = min(self.node, self.devices)
        return replace(self, devices=ranks, batch=ranks * max(self.batch // self.devices, 1))


def question(
    workload: Workload,
    cluster: Cluster,
    *,
    batch: int,
    devices: int | None = None,
    memory_bytes: float | None = None,
    axes: Collection[str] | None = None,
) -> Question:
    """Return what to search, once its parts fit each other.

    Args:
        workload: of one model.
        cluster: where it is to run.
        batch: samples of a step.
        devices: how many to use; by default all.
        memory_bytes: what a rank may hold; by default what the smallest device has.
        axes: names of those that a plan may use; by default all that a search knows.

    Raises:
        PlanError: they do not fit; the message says what would.
    """
    count = cluster.devices if devices is None else devices
    if not 1 <= count <= cluster.devices:
        raise PlanError(
            f"a plan for {count} devices was asked for, but the cluster '{cluster.name}' has {cluster.devices}; ask "
            f"for 1 to {cluster.devices}, or describe a larger cluster."
        )
    if batch < 1:
        raise PlanError(f"the batch is {batch} samples; it is at least 1.")
    known = [axis.value for axis in AXES]
    for name in axes or ():
        if name not in known:
            raise PlanError(f"the search has no axis '{name}'; it has {', '.join(known)}.{nearest(name, known)}")
    smallest = min(group.device.memory_bytes for group in cluster.groups)
    return Question(
        workload,
        cluster,
        count,
        batch,
        smallest if memory_bytes is None else memory_bytes,
        frozenset(AXES if axes is None else map(Axis, axes)),
    )
