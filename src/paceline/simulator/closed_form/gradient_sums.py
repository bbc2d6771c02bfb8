"""What replicas exchange in a step: sums of gradients, and parts of parameters and of the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.cluster.collectives import SERVER, collective_seconds
from paceline.simulator.layouts import Integers, Layouts
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
    size: Integers
    stride: Integers
    times: Numbers
    hidden: bool

    def seconds(self, cluster: Cluster) -> Numbers:
        """Return what it takes in a step if nothing else runs."""
        each = collective_seconds(cluster, self.kind, self.nbytes, self.size, self.stride)
        return np.asarray(np.where(self.size > 1, self.times * each, 0.0))


@dataclass(frozen=True)
class Sums:
    """Seconds of what replicas exchange in a step if nothing else runs, by axis.

    Attributes:
        total: all of it.
        hideable: what may run beside computation.
    """

    total: dict[str, Numbers]
    hideable: dict[str, Numbers]

    def exposed(self, beside: Numbers, layouts: Layouts, overlap: float, factor: float) -> dict[str, Numbers]:
        """Return by axis the seconds that nothing runs beside.

        Network and device are two resources: what can be hidden is, up to the share `overlap` of the computation
        `beside` it. All exchanges take `factor` times what they take alone.
        """
        both = factor * sum(self.hideable.values(), start=np.zeros(()))
        hidden = np.where(layouts.overlap, np.minimum(both, overlap * beside), 0.0)
        share = np.where(both > 0, hidden / np.where(both > 0, both, 1.0), 0.0)
        return {axis: factor * (self.total[axis] - share * self.hideable[axis]) for axis in self.total}


def sums(found: Sequence[Exchange], cluster: Cluster) -> Sums:
    """Return what exchanges take if nothing else runs."""
    total = {"dp": np.zeros(()), "fsdp": np.zeros(())}
    hideable = dict(total)
    for exchange in found:
        if not np.any(exchange.times):
            continue
        seconds = exchange.seconds(cluster)
        total[exchange.axis] = total[exchange.axis] + seconds
        if exchange.hidden:
            hideable[exchange.axis] = hideable[exchange.axis] + seconds
    return Sums(total, hideable)


def exchanges(parameters: Numbers, layouts: Layouts, precision: Precision) -> list[Exchange]:
    """Return what replicas exchange for so many parameters on one rank, before `fsdp` splits them.

    ZeRO 1 and 2 add gradients up in parts and gather updated parameters once; 3 gathers parameters for each pass of
    each micro-batch, and scatters its gradients. A distributed optimizer's updated parameters are gathered beside the
    forward pass that needs them. Where the batch is split twice, `dp` sums what `fsdp` has scattered. A parameter
    server takes the place of its all-reduce.
    """
    inner = layouts.tp * layouts.hw * layouts.sp
    outer = inner * layouts.fsdp
    gradients, values = precision.gradient * parameters, precision.parameter * parameters
    sharded = layouts.fsdp > 1
    full = np.where(sharded & (layouts.zero == 3), layouts.micro_batches, 0.0)
    once = np.where(sharded & (layouts.zero < 3), 1.0, 0.0)
    distributed = np.where(~sharded & (layouts.zero > 0), 1.0, 0.0)
    served = np.where(layouts.server, 1.0 - distributed, 0.0)
    plain = 1.0 - distributed - served

    # Parts of a sequence or an image hold the same parameters: they take part in the sums of replicas.
    alone, parts = layouts.fsdp == 1, layouts.sp * layouts.hw
    size = np.where(alone, layouts.dp * parts, layouts.dp)
    stride = np.where(alone, layouts.tp, outer)
    scattered = Exchange(
        "dp", "all_reduce", gradients / layouts.fsdp, np.where(alone, 1, parts), layouts.tp, full + once, hidden=True
    )

    def fsdp(kind: str, nbytes: Numbers, times: Numbers, *, hidden: bool = True) -> Exchange:
        return Exchange("fsdp", kind, nbytes, layouts.fsdp, inner, times, hidden)

    def dp(kind: str, nbytes: Numbers, times: Numbers) -> Exchange:
        return Exchange("dp", kind, nbytes, size, stride, times, hidden=True)

    return [
        fsdp("reduce_scatter", gradients, full + once),
        scattered,
        fsdp("all_gather", values, 2 * full),
        fsdp("all_gather", values, once, hidden=False),
        dp("all_reduce", gradients / layouts.fsdp, plain),
        dp(SERVER, gradients / layouts.fsdp, served),
        dp("reduce_scatter", gradients, distributed),
        dp("all_gather", values, distributed),
    ]
