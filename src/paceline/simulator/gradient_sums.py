"""What replicas exchange in a step: sums of gradients, and parts of parameters and of the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.cluster.collectives import collective_seconds, link_bytes
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Numbers, Precision


@dataclass(frozen=True)
class Exchange:
    """One collective among replicas, and when it happens.

    Attributes:
        axis: `dp` or `fsdp`.
        kind: of the collective.
        nbytes: of the whole tensor.
        size, stride: of its group.
        times: how often in a step.
        hidden: computation may run beside it.
    """

    axis: str
    kind: str
    nbytes: Numbers
    size: Numbers
    stride: Numbers
    times: Numbers
    hidden: bool

    def seconds(self, cluster: Cluster) -> Numbers:
        """Return what it takes in a step if nothing else runs."""
        each = collective_seconds(cluster, self.kind, self.nbytes, self.size, self.stride)
        return np.asarray(np.where(self.size > 1, self.times * each, 0.0))

    def sent(self, cluster: Cluster) -> dict[str, Numbers]:
        """Return bytes that a rank sends in a step, by level."""
        by_level = link_bytes(cluster, self.kind, self.nbytes, self.size, self.stride)
        return {level: np.where(self.size > 1, self.times * each, 0.0) for level, each in by_level.items()}


def exchanges(parameters: Numbers, layouts: Layouts, precision: Precision) -> list[Exchange]:
    """Return what replicas exchange for so many parameters on one rank, before `fsdp` splits them.

    ZeRO 1 and 2 add gradients up in parts and gather updated parameters once; 3 gathers parameters for each pass of
    each micro-batch, and scatters its gradients. Where the batch is split twice, `dp` sums what `fsdp` has scattered.
    """
    inner = layouts.tp * layouts.hw * layouts.sp
    outer = inner * layouts.fsdp
    gradients, values = precision.gradient * parameters, precision.parameter * parameters
    zero = np.where(layouts.fsdp > 1, np.maximum(layouts.zero, 1), 0)
    full = layouts.micro_batches
    plain = (layouts.fsdp == 1) & (layouts.zero == 0)
    rest = gradients / layouts.fsdp
    distributed = np.where((layouts.fsdp == 1) & (layouts.zero > 0), 1.0, 0.0)
    once = np.where(layouts.fsdp > 1, 1.0, 0.0)

    def fsdp(kind: str, nbytes: Numbers, times: Numbers, hidden: bool) -> Exchange:
        return Exchange("fsdp", kind, nbytes, layouts.fsdp, inner, times, hidden)

    def dp(kind: str, nbytes: Numbers, times: Numbers, hidden: bool) -> Exchange:
        return Exchange("dp", kind, nbytes, layouts.dp, outer, times, hidden)

    return [
        fsdp("reduce_scatter", gradients, np.where(zero == 3, full, once), True),
        fsdp("all_gather", values, np.where(zero == 3, 2 * full, 0), True),
        fsdp("all_gather", values, np.where(zero == 3, 0, once), False),
        dp("all_reduce", rest, np.where(plain | (layouts.fsdp > 1), 1.0, 0.0), True),
        dp("reduce_scatter", gradients, distributed, True),
        dp("all_gather", values, distributed, False),
    ]


def exposed(
    found: list[Exchange], beside: Numbers, layouts: Layouts, cluster: Cluster, overlap: float
) -> dict[str, Numbers]:
    """Return by axis the seconds of exchanges that nothing runs beside.

    Network and device are two resources: of what can be hidden, as much is as the share `overlap` of the computation
    `beside` it allows.
    """
    total: dict[str, Numbers] = {"dp": np.zeros(()), "fsdp": np.zeros(())}
    hideable: dict[str, Numbers] = {"dp": np.zeros(()), "fsdp": np.zeros(())}
    for exchange in found:
        seconds = exchange.seconds(cluster)
        total[exchange.axis] = total[exchange.axis] + seconds
        if exchange.hidden:
            hideable[exchange.axis] = hideable[exchange.axis] + seconds
    both = hideable["dp"] + hideable["fsdp"]
    hidden = np.where(layouts.overlap, np.minimum(both, overlap * beside), 0.0)
    share = np.where(both > 0, hidden / np.where(both > 0, both, 1.0), 0.0)
    return {axis: total[axis] - share * hideable[axis] for axis in total}
