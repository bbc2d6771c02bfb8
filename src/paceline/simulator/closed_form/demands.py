"""What a step asks for, by layout: of devices, whatever their rates, and of the network, each collective alone.

Rates turn these demands into seconds (`step_seconds`), so a calibration that tries rates computes them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.cluster import Cluster
from paceline.cluster.collectives import collective_seconds
from paceline.simulator.layouts import Integers, Layouts
from paceline.simulator.workload import Along, Block, Collective, Kind, Message, Numbers, Pass, Recompute

AXES = {Along.TP: "tp", Along.SP: "sp", Along.HW: "hw"}
"""Names of the axes over which blocks exchange."""


@dataclass(frozen=True)
class Products:
    """Matrix products, a row for each and a column for each layout.

    Attributes:
        flops: of all that are alike, counted as often as they are done.
        sizes: rows, columns and inner dimension, stacked in front.
    """

    flops: NDArray[np.float64]
    sizes: NDArray[np.float64]


@dataclass(frozen=True)
class PassDemand:
    """What one pass of a block asks for with one micro-batch on one rank.

    Attributes:
        products: matrix products.
        attention: operations of fused attention.
        touched: bytes that go through memory.
        launches: calls that the host starts.
    """

    products: Products
    attention: Numbers
    touched: Numbers
    launches: Numbers


@dataclass(frozen=True)
class Demand:
    """What one occurrence of a block asks for with one micro-batch on one rank.

    Attributes:
        forward, backward: of the device; what is computed again counts with the backward pass.
        network: seconds of collectives by axis if each had the network to itself.
        messages: collectives that the host starts.
    """

    forward: PassDemand
    backward: PassDemand
    network: Mapping[str, Numbers]
    messages: Numbers


def block_demand(block: Block, layouts: Layouts, cluster: Cluster) -> Demand:
    """Return what one occurrence of a block asks for, for each layout."""
    network, messages = _network(block.messages, layouts, cluster)
    return Demand(_pass(block, Pass.FORWARD, layouts), _pass(block, Pass.BACKWARD, layouts), network, messages)


def passes(when: Pass, layouts: Layouts, *, selective: bool) -> dict[Pass, Numbers]:
    """Return how often work of a pass is done in each: forward work once more where the backward pass recomputes it."""
    again = layouts.recompute == Recompute.FULL.value
    if selective:
        again = again | (layouts.recompute == Recompute.SELECTIVE.value)
    if when is Pass.BACKWARD:
        return {Pass.FORWARD: np.zeros(()), Pass.BACKWARD: np.ones(())}
    return {Pass.FORWARD: np.ones(()), Pass.BACKWARD: again.astype(np.float64)}


def _pass(block: Block, when: Pass, layouts: Layouts) -> PassDemand:
    products: list[tuple[Numbers, list[Numbers]]] = []
    attention = touched = launches = np.zeros(())
    for work in block.work:
        often = passes(work.when, layouts, selective=work.selective)[when]
        if not np.any(often):
            continue
        touched = touched + often * work.nbytes.on(layouts)
        launches = launches + often * work.launches
        if work.kind is Kind.PRODUCT:
            products.append((often * work.flops(layouts), [dim.on(layouts) for dim in work.dims]))
        elif work.kind is Kind.ATTENTION:
            attention = attention + often * work.flops(layouts)
    return PassDemand(_stacked(products, len(layouts)), attention, touched, launches)


def _stacked(products: list[tuple[Numbers, list[Numbers]]], layouts: int) -> Products:
    flops, sizes = np.zeros((len(products), layouts)), np.ones((3, len(products), layouts))
    for row, (each, dims) in enumerate(products):
        flops[row] = each
        for axis, dim in enumerate(dims):
            sizes[axis, row] = dim
    return Products(flops, sizes)


def strides(layouts: Layouts) -> dict[Along, Integers]:
    """Return how far apart neighbours of each axis inside a replica are, in ranks."""
    return {Along.TP: np.ones_like(layouts.tp), Along.HW: layouts.tp, Along.SP: layouts.tp * layouts.hw}


def _network(messages: tuple[Message, ...], layouts: Layouts, cluster: Cluster) -> tuple[dict[str, Numbers], Numbers]:
    """Return seconds of the network by axis, and how many collectives the host starts."""
    seconds = dict.fromkeys(AXES.values(), np.zeros(()))
    calls = np.zeros(())
    for message, often in sendings(messages, layouts):
        axis = AXES[message.along]
        seconds[axis] = seconds[axis] + often * _alone(message, layouts, cluster)
        calls = calls + often
    return seconds, calls


def sendings(messages: tuple[Message, ...], layouts: Layouts) -> list[tuple[Message, Numbers]]:
    """Return messages that some layout sends, and how often each does; what is sent several times is told once."""
    counts: dict[tuple[object, ...], tuple[Message, Numbers]] = {}
    for message in messages:
        size = getattr(layouts, AXES[message.along])
        if np.any(size > 1):
            key = (message.kind, message.along, id(message.nbytes))
            often = np.where(size > 1, 1.0, 0.0) * sum(passes(message.when, layouts, selective=False).values())
            counts[key] = (message, counts.get(key, (message, np.zeros(())))[1] + often)
    return list(counts.values())


def _alone(message: Message, layouts: Layouts, cluster: Cluster) -> Numbers:
    """Return the seconds of one collective; where regions are split, an all-reduce is done in its two halves."""
    nbytes, size = message.nbytes.on(layouts), getattr(layouts, AXES[message.along])
    stride = strides(layouts)[message.along]

    def seconds(kind: Collective) -> Numbers:
        return collective_seconds(cluster, kind.value, nbytes, size, stride)

    halved = layouts.regions & (message.along is Along.TP) & (message.kind is Collective.ALL_REDUCE)
    if not np.any(halved):
        return seconds(message.kind)
    halves = seconds(Collective.ALL_GATHER) + seconds(Collective.REDUCE_SCATTER)
    return np.asarray(np.where(halved, halves, seconds(message.kind)))
