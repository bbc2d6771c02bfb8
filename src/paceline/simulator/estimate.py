"""What a step takes, by a closed form for thousands of layouts at once."""

from __future__ import annotations

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.cluster.collectives import collective_seconds, link_bytes
from paceline.simulator.blocks_time import AXES, Times, block_times
from paceline.simulator.bubbles import waits
from paceline.simulator.estimates import Estimates
from paceline.simulator.gradient_sums import exchanges, exposed
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Along, Block, Numbers, Pass, Workload

HOST = 8
"""Devices of a host, in whose doublings growth is counted where a cluster has one level alone."""


def estimate(workload: Workload, layouts: Layouts, cluster: Cluster) -> Estimates:
    """Return the seconds of one step of a workload, for each layout, on the slowest devices of a cluster.

    A step is a pipeline's slowest rank for all micro-batches, what filling and draining add, exchanges among replicas
    that do not hide behind the backward pass, the update, and a constant.
    """
    dtype = workload.precision.dtype
    rates = cluster.slowest.device.rates
    middle = [block for block in workload.blocks if np.any(np.asarray(block.count) > 1)]
    ends = [block for block in workload.blocks if not np.any(np.asarray(block.count) > 1)]
    repeated = _sum([_scaled(block, block_times(block, layouts, cluster, dtype), layouts) for block in middle])
    single = _sum([block_times(block, layouts, cluster, dtype) for block in ends[-1:]])
    first = _sum([block_times(block, layouts, cluster, dtype) for block in ends[:-1]])
    several = layouts.pp > 1
    # the last rank has the head; the first one's blocks stand beside it only where there is one rank
    transfer = _transfer(middle or list(workload.blocks), layouts, cluster)
    last = repeated.total + single.total + np.where(several, 0.0, first.total) + transfer
    growth = 1 + rates.growth * _doublings(layouts, cluster)
    micro_batches = layouts.micro_batches
    bubble = growth * (waits(layouts) * (repeated.total + transfer) + np.where(several, first.total, 0.0))
    parameters = _parameters(workload, layouts)
    beside = repeated.backward + single.backward
    sums = exposed(exchanges(parameters, layouts, workload.precision), beside, layouts, cluster, rates.overlap)
    optimizer = _optimizer(parameters, workload, layouts, cluster)
    constant = np.asarray(rates.step_s + rates.step_growth_s * _doublings(layouts, cluster))
    axes = {axis: growth * micro_batches * _alone(repeated, single, first, several, axis) for axis in AXES.values()}
    axes["pp"] = growth * micro_batches * transfer
    compute = growth * micro_batches * last - sum(axes.values(), start=np.zeros(()))
    step = compute + sum(axes.values(), start=np.zeros(())) + bubble + sums["dp"] + sums["fsdp"] + optimizer + constant
    everywhere = np.zeros(len(layouts))
    return Estimates(
        step_s=step + everywhere,
        compute_s=compute + everywhere,
        exposed_s={name: value + everywhere for name, value in (axes | sums).items()},
        bubble_s=bubble + everywhere,
        optimizer_s=optimizer + everywhere,
        constant_s=constant + everywhere,
        spread=np.full(len(layouts), rates.spread),
        flops=model_flops(workload, layouts) + everywhere,
        link_bytes=_link_bytes(workload, parameters, layouts, cluster),
    )


def model_flops(workload: Workload, layouts: Layouts) -> Numbers:
    """Return the operations of the whole batch on one device, without recomputation."""
    whole = Layouts.of(micro_batch=layouts.batch)
    total = np.zeros(())
    for block in workload.blocks:
        total = total + block.count * sum((work.flops(whole) for work in block.work), start=np.zeros(()))
    return np.asarray(total)


def _sum(times: list[Times]) -> Times:
    zero = np.zeros(())
    return Times(
        sum((each.forward for each in times), start=zero),
        sum((each.backward for each in times), start=zero),
        {axis: sum((each.exposed[axis] for each in times), start=zero) for axis in AXES.values()},
    )


def _scaled(block: Block, times: Times, layouts: Layouts) -> Times:
    """Return what a rank of a pipeline spends on a repeated block: as often as the fullest rank has it."""
    stages = layouts.pp * layouts.chunks
    often = np.ceil(np.asarray(block.count) / stages) * layouts.chunks
    return Times(
        often * times.forward,
        often * times.backward,
        {axis: often * each for axis, each in times.exposed.items()},
    )


def _alone(repeated: Times, single: Times, first: Times, several: Numbers, axis: str) -> Numbers:
    return repeated.exposed[axis] + single.exposed[axis] + np.where(several, 0.0, first.exposed[axis])


def _transfer(blocks: list[Block], layouts: Layouts, cluster: Cluster) -> Numbers:
    """Return what messages between stages add to a rank's work on one micro-batch."""
    if np.all(layouts.pp == 1):
        return np.zeros(())
    nbytes = blocks[-1].output.on(layouts)
    stride = layouts.devices // layouts.pp
    each = collective_seconds(cluster, "send", nbytes, 2, stride)
    factor = cluster.slowest.device.rates.transfer
    return np.asarray(np.where(layouts.pp > 1, 2 * factor * layouts.chunks * each, 0.0))


def _parameters(workload: Workload, layouts: Layouts) -> Numbers:
    """Return elements of parameters on the rank of a pipeline that has most, before `fsdp` splits them."""
    total, largest = np.zeros(()), np.zeros(())
    for block in workload.blocks:
        each = sum((amount.on(layouts) for amount in block.parameters), start=np.zeros(()))
        if np.any(np.asarray(block.count) > 1):
            total = total + each * np.ceil(np.asarray(block.count) / (layouts.pp * layouts.chunks)) * layouts.chunks
        else:
            largest = np.where(layouts.pp > 1, np.maximum(largest, each), largest + each)
    return np.asarray(total + largest)


def _optimizer(parameters: Numbers, workload: Workload, layouts: Layouts, cluster: Cluster) -> Numbers:
    """Return seconds of the update: state is read and written, gradients are read, parameters are written."""
    precision, device = workload.precision, cluster.slowest.device
    each = 2 * precision.optimizer + precision.gradient + precision.parameter
    parts = np.where(layouts.fsdp > 1, layouts.fsdp, np.where(layouts.zero > 0, layouts.dp, 1))
    return np.asarray(device.rates.optimizer * each * parameters / parts / (device.bandwidth * device.rates.memory))


def _doublings(layouts: Layouts, cluster: Cluster) -> Numbers:
    """Return the logarithm, to base 2, of how many hosts take part."""
    host = cluster.levels[0].devices or HOST
    return np.log2(np.maximum(layouts.devices / host, 1.0))


def _link_bytes(workload: Workload, parameters: Numbers, layouts: Layouts, cluster: Cluster) -> dict[str, Numbers]:
    """Return bytes that one rank sends in a step, by level of the network."""
    total = {level.name: np.zeros(len(layouts)) for level in cluster.levels}

    def add(sent: dict[str, Numbers], often: Numbers) -> None:
        for level, nbytes in sent.items():
            total[level] = total[level] + often * nbytes

    strides = {Along.TP: 1, Along.HW: layouts.tp, Along.SP: layouts.tp * layouts.hw}
    for block in workload.blocks:
        count = np.asarray(block.count)
        often = np.where(count > 1, np.ceil(count / layouts.pp), 1.0) * layouts.micro_batches
        for message in block.messages:
            size = getattr(layouts, AXES[message.along])
            if np.all(size == 1):
                continue
            again = (message.when is Pass.FORWARD) & (layouts.recompute == 2)
            sent = link_bytes(cluster, message.kind.value, message.nbytes.on(layouts), size, strides[message.along])
            add(dict(sent), np.where(size > 1, often * (1 + again), 0.0))
    for exchange in exchanges(parameters, layouts, workload.precision):
        add(exchange.sent(cluster), np.ones(()))
    if np.any(layouts.pp > 1):
        nbytes = workload.blocks[len(workload.blocks) // 2].output.on(layouts)
        sent = link_bytes(cluster, "send", nbytes, 2, layouts.devices // layouts.pp)
        add(dict(sent), np.where(layouts.pp > 1, 2 * layouts.chunks * layouts.micro_batches, 0.0))
    return total
