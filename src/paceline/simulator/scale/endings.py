"""The end of a step on each rank of a pipeline: sums of gradients among replicas, the update, updated parameters.

Network and device are two resources. The sum of a stage's gradients begins while its last backward pass runs, as far as
the rates say that they go side by side, and after the sums of the rank's other stages that were ready before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.schedule.places import Replicas
from paceline.simulator.closed_form.step_seconds import update_seconds
from paceline.simulator.layouts import Layouts
from paceline.simulator.scale.flow import Flow
from paceline.simulator.scale.stage_traffic import Traffic
from paceline.simulator.workload import Numbers, Workload

AXES = ("dp", "fsdp")


@dataclass(frozen=True)
class Endings:
    """Seconds, arrays over the ranks of a pipeline.

    Attributes:
        summed: when gradients are added up.
        update: what the optimizer takes.
        waited_by: for sums after the last pass, by axis.
        late_by: what collectives after the update take, by axis.
        began, sums: of stages, when the sum of their gradients began, and what it takes.
    """

    summed: Numbers
    update: Numbers
    waited_by: dict[str, Numbers]
    late_by: dict[str, Numbers]
    began: Numbers
    sums: Numbers

    @property
    def ended(self) -> Numbers:
        """When ranks are through."""
        return np.asarray(self.summed + self.update + sum(self.late_by.values()))


def endings(
    workload: Workload,
    layout: Layouts,
    cluster: Cluster,
    places: Replicas,
    sent: Traffic,
    flow: Flow,
    backward: Numbers,
) -> Endings:
    """Return how a step ends on each rank of a pipeline.

    Args:
        workload: what is trained.
        layout: how it is split.
        cluster: on what.
        places: the rank of each stage.
        sent: what stages send.
        flow: when passes are over, on the slowest replica.
        backward: seconds of the calls of each stage's backward pass, beside which sums may run.
    """
    ranks = len(flow.ended)
    overlap = cluster.slowest.device.rates.overlap if layout.overlap[0] else 0.0
    whole = np.asarray(sum(sent.sums.values()))
    began = np.zeros(len(places))
    summed = flow.ended.copy()
    waited_by = {axis: np.zeros(ranks) for axis in AXES}
    for rank in range(ranks):
        mine = [stage for stage, on in enumerate(places) if rank in on]
        free = 0.0
        for stage in sorted(mine, key=lambda each: float(flow.last_ended[each])):
            beside = overlap * min(flow.last_ended[stage] - flow.last_began[stage], backward[stage])
            ready = flow.last_ended[stage] - beside if layout.overlap[0] else flow.ended[rank]
            began[stage] = max(free, float(ready))
            free = began[stage] + float(whole[stage])
        waited = max(free - float(flow.ended[rank]), 0.0)
        summed[rank] += waited
        total = float(whole[mine].sum())
        for axis in AXES:
            waited_by[axis][rank] = waited * float(sent.sums[axis][mine].sum()) / total if total else 0.0
    parameters = of_ranks(places, sent.parameters)
    update = np.broadcast_to(update_seconds(parameters, workload, layout, cluster), (ranks,))
    return Endings(summed, update, waited_by, {axis: of_ranks(places, sent.late[axis]) for axis in AXES}, began, whole)


def of_ranks(places: Replicas, of_stages: Numbers) -> Numbers:
    """Return for each rank the sum over its stages."""
    found = np.zeros(1 + max(rank for on in places for rank in on))
    for stage, (rank,) in enumerate(places):
        found[rank] += of_stages[stage]
    return found
