"""What a step takes, by a closed form for thousands of layouts at once."""

from __future__ import annotations

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.cluster.collectives import link_bytes
from paceline.simulator.closed_form.demands import AXES, sendings, strides
from paceline.simulator.closed_form.estimates import Estimates
from paceline.simulator.closed_form.kriging import coordinates, kriged
from paceline.simulator.closed_form.step_seconds import StepDemand, boundary, occurrences, step_demand, step_parts
from paceline.simulator.layouts import Integers, Layouts
from paceline.simulator.workload import Numbers, Workload


def estimate(workload: Workload, layouts: Layouts, cluster: Cluster) -> Estimates:
    """Return the seconds of one step of a workload, for each layout, on the slowest devices of a cluster.

    Where the rates carry fitted rows, all parts are corrected alike by what rows nearby left over.
    All arrays are as long as the layouts. A workload whose amounts are arrays of that length describes as many models.
    """
    demand = step_demand(workload, layouts, cluster)
    parts = step_parts(demand, workload, layouts, cluster)
    factor, spread = correction(workload, layouts, cluster)

    def corrected(values: Numbers) -> Numbers:
        return np.asarray(factor * values)

    return Estimates(
        step_s=corrected(parts.step_s),
        compute_s=corrected(parts.compute_s),
        exposed_s={axis: corrected(seconds) for axis, seconds in parts.exposed_s.items()},
        bubble_s=corrected(parts.bubble_s),
        optimizer_s=corrected(parts.optimizer_s),
        constant_s=corrected(parts.constant_s),
        spread=spread,
        flops=np.broadcast_to(model_flops(workload, layouts), len(layouts)),
        link_bytes=sent_bytes(workload, demand, layouts, cluster),
    )


def correction(workload: Workload, layouts: Layouts, cluster: Cluster) -> tuple[Numbers, Numbers]:
    """Return by what fitted rows nearby say that all parts are to be multiplied, and how sure that makes a step."""
    rates = cluster.slowest.device.rates
    if not rates.residuals:
        return np.ones(len(layouts)), np.full(len(layouts), rates.spread)
    expected, spread = kriged(coordinates(workload, layouts, cluster), rates.residuals)
    return np.exp(expected), spread


def model_flops(workload: Workload, layouts: Layouts) -> Numbers:
    """Return the operations of the whole batch, without recomputation."""
    whole = Layouts.of(micro_batch=layouts.batch)
    total = np.zeros(())
    for block in workload.blocks:
        total = total + block.count * sum((work.flops(whole) for work in block.work), start=np.zeros(()))
    return np.asarray(total)


def sent_bytes(workload: Workload, demand: StepDemand, layouts: Layouts, cluster: Cluster) -> dict[str, Numbers]:
    """Return bytes that one rank sends in a step, by level of the network."""
    total = {level.name: np.zeros(len(layouts)) for level in cluster.levels}

    def add(kind: str, nbytes: Numbers, size: Integers, stride: Integers, times: Numbers) -> None:
        for level, each in link_bytes(cluster, kind, nbytes, size, stride).items():
            total[level] = total[level] + np.where(size > 1, times * each, 0.0)

    for block in workload.blocks:
        often = occurrences(block, layouts) * layouts.micro_batches
        for message, times in sendings(block.messages, layouts):
            size, stride = getattr(layouts, AXES[message.along]), strides(layouts)[message.along]
            add(message.kind.value, message.nbytes.on(layouts), size, stride, often * times)
    for exchange in demand.exchanges:
        if np.any(exchange.times):
            add(exchange.kind, exchange.nbytes, exchange.size, exchange.stride, exchange.times)
    if np.any(layouts.pp > 1):
        nbytes, stride = boundary(workload).output.on(layouts), layouts.devices // layouts.pp
        times = np.where(layouts.pp > 1, 2.0 * layouts.chunks * layouts.micro_batches, 0.0)
        add("send", nbytes, np.asarray(2), stride, times)
    return total
