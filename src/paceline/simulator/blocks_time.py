"""Seconds of one occurrence of a block for one micro-batch, on the device and of its collectives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.cluster.cluster import Cluster, Device
from paceline.cluster.collectives import collective_seconds
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Along, Block, Collective, Kind, Message, Numbers, Pass, Recompute, Work

AXES = {Along.TP: "tp", Along.SP: "sp", Along.HW: "hw"}


@dataclass(frozen=True)
class Times:
    """Seconds of a block for one micro-batch, recomputation counted with the backward pass.

    Attributes:
        forward, backward: on the device alone, launches included.
        exposed: by axis, what its collectives add.
    """

    forward: Numbers
    backward: Numbers
    exposed: dict[str, Numbers]

    @property
    def total(self) -> Numbers:
        """All of it."""
        return self.forward + self.backward + sum(self.exposed.values(), start=np.zeros(()))


def work_seconds(work: Work, layouts: Layouts, device: Device, dtype: str) -> Numbers:
    """Return what a call takes on a device that has been told of it."""
    rates = device.rates
    peak = device.peak.get(dtype) or max(device.peak.values())
    touched = work.nbytes.on(layouts) / (device.bandwidth * rates.memory)
    if work.kind is Kind.TOUCH:
        return touched
    flops = work.flops(layouts)
    if work.kind is Kind.ATTENTION:
        return np.asarray(flops / (peak * rates.attention) + touched)
    halves = (rates.m_half, rates.n_half, rates.k_half)
    seconds = flops / (peak * rates.matmul)
    for dim, half in zip(work.dims, halves, strict=True):
        seconds = seconds * (1 + half / dim.on(layouts))
    return np.asarray(seconds + touched)


def block_times(block: Block, layouts: Layouts, cluster: Cluster, dtype: str) -> Times:
    """Return the seconds of one occurrence of a block.

    Host and device work side by side: together they take the norm of power `Rates.launch_power` of what each takes.
    """
    group = cluster.slowest
    rates = group.device.rates
    compute: dict[Pass, Numbers] = {}
    launches: dict[Pass, Numbers] = {}
    for when in Pass:
        mine = [(work, _times_done(work, when, layouts)) for work in block.work]
        seconds = [often * work_seconds(work, layouts, group.device, dtype) for work, often in mine if np.any(often)]
        compute[when] = group.slowdown * sum(seconds, start=np.zeros(()))
        launches[when] = rates.launch_s * sum((often * work.launches for work, often in mine), start=np.zeros(()))
    network, calls = _messages(block.messages, layouts, cluster)
    alone = {when: _norm(compute[when], launches[when], rates.launch_power) for when in Pass}
    sent = sum(network.values(), start=np.zeros(()))
    device, host = sum(compute.values(), start=sent), sum(launches.values(), start=rates.message_s * calls)
    extra = _norm(device, host, rates.launch_power) - alone[Pass.FORWARD] - alone[Pass.BACKWARD]
    share = np.where(sent > 0, extra / np.where(sent > 0, sent, 1.0), 0.0)
    return Times(alone[Pass.FORWARD], alone[Pass.BACKWARD], {axis: share * each for axis, each in network.items()})


def _norm(left: Numbers, right: Numbers, power: float) -> Numbers:
    return np.asarray((left**power + right**power) ** (1 / power))


def _times_done(work: Work, when: Pass, layouts: Layouts) -> Numbers:
    """Return how often a call is done in a pass: forward calls once more in a backward pass that recomputes them."""
    if work.when is when:
        return np.ones(())
    if work.when is Pass.BACKWARD:
        return np.zeros(())
    again = layouts.recompute == Recompute.FULL.value
    if work.selective:
        again = again | (layouts.recompute == Recompute.SELECTIVE.value)
    return again.astype(np.float64)


def _messages(messages: tuple[Message, ...], layouts: Layouts, cluster: Cluster) -> tuple[dict[str, Numbers], Numbers]:
    """Return seconds of the network by axis, and how many collectives the host starts."""
    seconds = {axis: np.zeros(()) for axis in AXES.values()}
    calls = np.zeros(())
    strides = {Along.TP: 1, Along.HW: layouts.tp, Along.SP: layouts.tp * layouts.hw}
    for message in messages:
        axis = AXES[message.along]
        size = getattr(layouts, axis)
        if np.all(size == 1):
            continue
        again = message.when is Pass.FORWARD
        often = np.where(size > 1, 1.0, 0.0) * (1 + again * (layouts.recompute == Recompute.FULL.value))
        nbytes, stride = message.nbytes.on(layouts), strides[message.along]
        each = collective_seconds(cluster, message.kind.value, nbytes, size, stride)
        if message.along is Along.TP and message.kind is Collective.ALL_REDUCE and np.any(layouts.regions):
            halves = [
                collective_seconds(cluster, kind.value, nbytes, size, stride)
                for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
            ]
            each = np.where(layouts.regions, halves[0] + halves[1], each)
        seconds[axis] = seconds[axis] + often * each
        calls = calls + often
    return seconds, calls
