"""The closed form: a step's demands and a cluster's rates make the parts of its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.cluster.collectives import collective_seconds
from paceline.simulator.closed_form.bubbles import waits
from paceline.simulator.closed_form.demands import Demand, block_demand
from paceline.simulator.closed_form.device_seconds import NOTHING, Times, block_times, wide_of
from paceline.simulator.closed_form.gradient_sums import Exchange, Sums, exchanges, sums
from paceline.simulator.layouts import Integers, Layouts
from paceline.simulator.workload import Block, Numbers, Workload


@dataclass(frozen=True)
class StepDemand:
    """What a step asks for on the rank that has most to do, for each layout.

    Attributes:
        before, repeated, after: blocks before those that repeat, these, and the others, for layouts that blocks can
            tell apart, each with how often the rank has it, for all layouts.
        which: of the layouts that blocks can tell apart, for each layout.
        parameters: elements of the rank, before `fsdp` splits them.
        transfer_s: of one micro-batch's messages between stages, in both passes.
        exchanges: among replicas.
        sums: what these take alone.
    """

    before: tuple[tuple[Demand, Numbers], ...]
    repeated: tuple[tuple[Demand, Numbers], ...]
    after: tuple[tuple[Demand, Numbers], ...]
    which: Integers
    parameters: Numbers
    transfer_s: Numbers
    exchanges: tuple[Exchange, ...]
    sums: Sums


@dataclass(frozen=True)
class Parts:
    """Seconds that add up to a step's; see `Estimates`."""

    compute_s: Numbers
    exposed_s: Mapping[str, Numbers]
    bubble_s: Numbers
    optimizer_s: Numbers
    constant_s: Numbers

    @property
    def step_s(self) -> Numbers:
        """All of them."""
        exposed = sum(self.exposed_s.values(), start=np.zeros(()))
        return np.asarray(self.compute_s + exposed + self.bubble_s + self.optimizer_s + self.constant_s)


def step_demand(workload: Workload, layouts: Layouts, cluster: Cluster) -> StepDemand:
    """Return what a step asks for, for each layout."""
    repeats = [index for index, block in enumerate(workload.blocks) if block.repeats]
    first = repeats[0] if repeats else len(workload.blocks) - 1
    apart, which = _apart(layouts) if _is_one_model(workload) else (layouts, np.arange(len(layouts)))
    groups: dict[str, list[tuple[Demand, Numbers]]] = {"before": [], "repeated": [], "after": []}
    for index, block in enumerate(workload.blocks):
        group = "repeated" if block.repeats else "before" if index < first else "after"
        groups[group].append((block_demand(block, apart, cluster), occurrences(block, layouts)))
    parameters = _parameters(workload, layouts)
    found = tuple(exchanges(parameters, layouts, workload.precision))
    return StepDemand(
        **{name: tuple(pairs) for name, pairs in groups.items()},
        which=which,
        parameters=parameters,
        transfer_s=_transfer(boundary(workload), layouts, cluster),
        exchanges=found,
        sums=sums(found, cluster),
    )


def step_parts(demand: StepDemand, workload: Workload, layouts: Layouts, cluster: Cluster) -> Parts:
    """Return what a step takes at the rates of a cluster's slowest devices.

    That is all micro-batches on the slowest rank of a pipeline, which also has the head; what filling and draining
    adds, through ranks without it; exchanges that do not hide behind backward passes; the update; a constant.
    """
    group, dtype = cluster.slowest, workload.precision.dtype
    rates = group.device.rates

    def total(pairs: tuple[tuple[Demand, Numbers], ...], dtype: str) -> Times:
        times = (block_times(each, group, dtype).of(demand.which).scaled(often) for each, often in pairs)
        return sum(times, start=NOTHING)

    wide = wide_of(dtype)
    before, repeated, after = total(demand.before, wide), total(demand.repeated, dtype), total(demand.after, wide)
    alone = np.where(layouts.pp > 1, 0.0, 1.0)
    rank = repeated + after + before.scaled(alone)
    transfer = rates.transfer * demand.transfer_s
    hosts = doublings(layouts, cluster)
    growth = 1 + rates.growth * hosts
    often = growth * layouts.micro_batches
    beside = repeated.backward + after.backward
    return Parts(
        compute_s=often * (rank.forward + rank.backward),
        exposed_s={
            **{axis: often * each for axis, each in rank.exposed.items()},
            "pp": often * transfer,
            **demand.sums.exposed(beside, layouts, rates.overlap, rates.exchange),
        },
        bubble_s=growth * (waits(layouts) * (repeated.total + transfer) + (1 - alone) * before.total),
        optimizer_s=update_seconds(demand.parameters, workload, layouts, cluster),
        constant_s=np.asarray(rates.step_s + rates.step_growth_s * hosts),
    )


def _apart(layouts: Layouts) -> tuple[Layouts, Integers]:
    """Return layouts that differ in something that blocks see, and which of them each layout is: they are few."""
    code = np.zeros(len(layouts), dtype=np.int64)
    for seen in (layouts.tp, layouts.sp, layouts.hw, layouts.micro_batch, layouts.regions, layouts.recompute):
        values, index = np.unique(seen, return_inverse=True)
        code = code * len(values) + index
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return layouts[first], which


def _is_one_model(workload: Workload) -> bool:
    """Whether what its blocks do are numbers, not arrays that are as long as the layouts."""
    work = [each for block in workload.blocks for each in block.work]
    amounts = [amount for each in work for amount in (*each.dims, each.times, each.nbytes)]
    amounts += [message.nbytes for block in workload.blocks for message in block.messages]
    return not any(np.ndim(amount.value) for amount in amounts)


def occurrences(block: Block, layouts: Layouts) -> Numbers:
    """Return how often the fullest rank of a pipeline has a block."""
    count = np.asarray(block.count, dtype=np.float64)
    if not block.repeats:
        return count
    return np.asarray(np.ceil(count / (layouts.pp * layouts.chunks)) * layouts.chunks)


def boundary(workload: Workload) -> Block:
    """Return a block whose output stages send."""
    return next((block for block in workload.blocks if block.repeats), workload.blocks[0])


def _transfer(block: Block, layouts: Layouts, cluster: Cluster) -> Numbers:
    if np.all(layouts.pp == 1):
        return np.zeros(())
    each = collective_seconds(cluster, "send", block.output.on(layouts), 2, layouts.devices // layouts.pp)
    return np.asarray(np.where(layouts.pp > 1, 2 * layouts.chunks * each, 0.0))


def _parameters(workload: Workload, layouts: Layouts) -> Numbers:
    """Return elements of parameters on the rank of a pipeline that has most of them."""
    repeated, once = np.zeros(()), np.zeros(())
    for block in workload.blocks:
        each = sum((amount.on(layouts) for amount in block.parameters), start=np.zeros(()))
        if block.repeats:
            repeated = repeated + each * occurrences(block, layouts)
        else:
            once = np.where(layouts.pp > 1, np.maximum(once, each), once + each)
    return np.asarray(repeated + once)


def update_seconds(parameters: Numbers, workload: Workload, layouts: Layouts, cluster: Cluster) -> Numbers:
    """Return seconds of the update: state is read and written, gradients are read, parameters are written."""
    precision, device = workload.precision, cluster.slowest.device
    each = 2 * precision.optimizer + precision.gradient + precision.parameter
    parts = np.where(layouts.fsdp > 1, layouts.fsdp, np.where(layouts.zero > 0, layouts.dp, 1))
    return np.asarray(device.rates.optimizer * each * parameters / parts / (device.bandwidth * device.rates.memory))


def doublings(layouts: Layouts, cluster: Cluster) -> Numbers:
    """Return the logarithm, to base 2, of how many of the innermost level's domains take part."""
    host = cluster.levels[0].devices or cluster.devices
    return np.asarray(np.log2(np.maximum(layouts.devices / host, 1.0)))
