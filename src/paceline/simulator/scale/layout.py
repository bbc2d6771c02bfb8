"""A step on up to hundreds of thousands of devices, by representatives: one rank for each rank of a pipeline.

All replicas that stand on equal devices do the same, so one is simulated, with the schedule that real ranks walk; and
of its micro-batches only enough to see how it goes on (`flow`). Seconds of passes are those of the estimate. Stages may
be uneven, groups of devices slow, and devices may differ by chance from step to step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from paceline.cluster.cluster import Cluster, Group
from paceline.errors import PlanError
from paceline.schedule import Kind, Op
from paceline.schedule.places import Replicas, one_each, round_robin, v_shape
from paceline.simulator.closed_form.device_seconds import wide_of
from paceline.simulator.closed_form.estimate import correction
from paceline.simulator.closed_form.estimates import Footprint
from paceline.simulator.closed_form.footprint import kept_bytes, rank_footprint
from paceline.simulator.closed_form.step_seconds import doublings
from paceline.simulator.layouts import SCHEDULES, Layouts
from paceline.simulator.scale.classes import Class, classes, slowest_factor
from paceline.simulator.scale.endings import Endings, endings, of_ranks
from paceline.simulator.scale.flow import Durations, Flow, Pipeline, flow
from paceline.simulator.scale.stage_traffic import Traffic, traffic
from paceline.simulator.scale.stages import NOTHING, Passes, block_passes, divide, occurrences
from paceline.simulator.workload import Block, Numbers, Workload

Stages = tuple[tuple[Block, ...], ...]


@dataclass(frozen=True)
class ScaleSimulation:
    """A step, and its representatives.

    Attributes:
        layout: what was simulated.
        step_s: seconds from the first action to the end of the last update.
        compute_s, exposed_s, bubble_s, optimizer_s, constant_s: what these are made of, on the rank of the pipeline
            that has most to compute; see `Estimates`. `exposed_s` is by axis.
        busy_s: of each rank of the pipeline, what it computes.
        memory: of each rank of the pipeline, at its peak.
        stages: the blocks of each.
        places: the rank of the pipeline that has it.
        flow: of the slowest replica.
        endings: of each rank of the pipeline.
        classes: of replicas that behave alike, each with how many there are.
        actions: how many were simulated, of all classes.
    """

    layout: Layouts
    step_s: float
    compute_s: float
    exposed_s: Mapping[str, float]
    bubble_s: float
    optimizer_s: float
    constant_s: float
    busy_s: Numbers
    memory: Footprint
    stages: Stages
    places: Replicas
    flow: Flow
    endings: Endings
    classes: Mapping[Class, int]
    actions: int

    @property
    def memory_bytes(self) -> float:
        """What the rank needs that needs most."""
        return float(self.memory.total.max())

    @property
    def fullest(self) -> int:
        """Which rank of the pipeline that is."""
        return int(self.memory.total.argmax())


def simulate_layout(
    workload: Workload, layout: Layouts, cluster: Cluster, *, jitter: float = 0.0, begins: Sequence[int] | None = None
) -> ScaleSimulation:
    """Simulate one step of one layout.

    Args:
        workload: whose amounts are numbers.
        layout: one.
        cluster: at least as large as the layout.
        jitter: standard deviation of a device's speed from step to step, as a share: the slowest of a tensor-parallel
            group, and the slowest stage of all replicas, are taken as slow as is to be expected of so many.
        begins: the blocks with which stages begin; by default those that make the slowest stage quickest.

    Raises:
        PlanError: there are several layouts, or more stages than blocks.
        ClusterError: the cluster is too small.
    """
    if len(layout) != 1:
        raise PlanError(f"one layout is simulated at a time, not {len(layout)}; index them.")
    model = _Model(workload, layout, cluster.of(int(layout.devices[0])), jitter)
    return _simulated(model, model.divided() if begins is None else model.cut(begins))


class _Model:
    """What a layout's passes take, each block's asked for once."""

    def __init__(self, workload: Workload, layout: Layouts, cluster: Cluster, jitter: float) -> None:
        factor = float(correction(workload, layout, cluster)[0][0])
        self.workload, self.layout, self.jitter = workload, layout, jitter
        self.cluster = _corrected(cluster, factor)
        self.kind, self.ranks = kind_of(layout), int(layout.pp[0])
        self.chunks = int(layout.chunks[0]) if self.kind is Kind.INTERLEAVED else 1
        self.places = _places(self.kind, self.ranks, self.chunks)
        self.rates = self.cluster.slowest.device.rates
        self.growth = factor * (1 + self.rates.growth * float(doublings(layout, cluster).max()))
        self._units = occurrences(workload)
        self._known: dict[tuple[int, int], Passes] = {}  # by the block's place in memory, and the group

    def divided(self) -> Stages:
        """Return the blocks of stages of which the slowest is quickest."""
        slowest = self.cluster.groups.index(self.cluster.slowest)
        return self.cut(divide([self.of(block, slowest).total for block in self._units], len(self.places)))

    def cut(self, begins: Sequence[int]) -> Stages:
        """Return the blocks of stages that begin with these."""
        ends = [*begins[1:], len(self._units)]
        return tuple(self._units[begin:end] for begin, end in zip(begins, ends, strict=True))

    def of(self, block: Block, group: int) -> Passes:
        """Return what a block takes on the devices of a group, with their links."""
        key = id(block), group
        if key not in self._known:
            alone = replace(self.cluster, groups=(replace(self.cluster.groups[group], devices=self.cluster.devices),))
            dtype = self.workload.precision.dtype
            found = block_passes(block, self.layout, alone, dtype if block.repeats else wide_of(dtype))
            self._known[key] = found.scaled(self.growth)
        return self._known[key]

    def passes(self, replicas: Class, stages: Stages) -> list[Passes]:
        """Return what each stage takes in a class of replicas, on the slowest group that it lies on."""
        found = []
        for blocks, (rank,) in zip(stages, self.places, strict=True):
            on = [sum((self.of(block, group) for block in blocks), start=NOTHING) for group in replicas[rank]]
            found.append(max(on, key=lambda passes: passes.total))
        return self._jittered(found) if self.jitter else found

    def _jittered(self, passes: list[Passes]) -> list[Passes]:
        """Let the stage that has most to do be the slowest of all devices, and others the slowest of their group."""
        devices = int(self.layout.devices[0])
        inner = devices // (self.ranks * int(self.layout.replicas[0]))
        busiest = int(of_ranks(self.places, np.array([each.total for each in passes])).argmax())
        of_all, of_group = (slowest_factor(count, self.jitter) for count in (devices, inner))
        factors = [of_all if rank == busiest else of_group for (rank,) in self.places]
        return [each.scaled(factor, network=1.0) for each, factor in zip(passes, factors, strict=True)]

    def gathered(self, passes: Passes, sent: Traffic, stage: int) -> tuple[float, float]:
        """Return what each pass of a stage waits for parameters, or to give away gradients, of its replicas."""
        share = self.rates.overlap if self.layout.overlap[0] else 0.0
        gather, scatter = float(sent.gather[stage]), float(sent.scatter[stage])
        return max(gather - share * passes.forward, 0.0), max(gather + scatter - share * passes.backward, 0.0)

    def durations(self, passes: Sequence[Passes], sent: Traffic) -> Durations:
        """Return seconds of the actions of each stage."""
        found: dict[tuple[Op, int], float] = {}
        for stage, each in enumerate(passes):
            waits_forward, waits_backward = self.gathered(each, sent, stage)
            backward = each.whole_backward + waits_backward
            found[Op.FORWARD, stage] = each.whole_forward + waits_forward
            found[Op.BACKWARD, stage] = backward
            found[Op.BACKWARD_INPUT, stage] = backward - each.weights
            found[Op.BACKWARD_WEIGHT, stage] = each.weights
            found[Op.SEND, stage] = float(sent.send[stage])
        return found


def _corrected(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with all that is not a pass so many times longer; see `estimate.correction`."""
    longer = ("exchange", "transfer", "optimizer", "step_s", "step_growth_s")

    def corrected(group: Group) -> Group:
        rates = group.device.rates
        rates = replace(rates, **{name: factor * getattr(rates, name) for name in longer})
        return replace(group, device=replace(group.device, rates=rates))

    return replace(cluster, groups=tuple(map(corrected, cluster.groups)))


def kind_of(layout: Layouts) -> Kind:
    """Return the kind of one layout's schedule; with one rank, or one stage on each, interleaving is nothing."""
    kind = Kind.of(SCHEDULES[int(layout.schedule[0])])
    alike = layout.pp[0] == 1 or (kind is Kind.INTERLEAVED and layout.chunks[0] == 1)
    return Kind.ONE_F_ONE_B if alike else kind


def _places(kind: Kind, ranks: int, chunks: int) -> Replicas:
    if kind is Kind.ZB_V:
        return v_shape(ranks)
    return round_robin(ranks, chunks) if kind is Kind.INTERLEAVED else one_each(ranks)


def _simulated(model: _Model, stages: Stages) -> ScaleSimulation:
    layout, cluster, workload, places = model.layout, model.cluster, model.workload, model.places
    sent = traffic(workload, layout, cluster, stages, places)
    count = int(layout.micro_batches[0])
    found = classes(cluster, layout)
    passes = {each: model.passes(each, stages) for each in found}
    flows = {}
    for each, taken in passes.items():
        through = Pipeline(model.kind, model.ranks, model.chunks, model.durations(taken, sent), sent.arrival)
        flows[each] = flow(through, count)
    slowest = max(flows, key=lambda each: float(flows[each].ended.max()))
    # sums of gradients begin when all replicas have theirs
    everybody = flows[slowest].at_latest(list(flows.values()))
    backward = np.array([each.backward for each in passes[slowest]])
    ended = endings(workload, layout, cluster, places, sent, everybody, backward)
    constant = model.rates.step_s + model.rates.step_growth_s * float(doublings(layout, cluster).max())
    step = float(ended.ended.max()) + constant
    calls = count * of_ranks(places, np.array([each.forward + each.backward for each in passes[slowest]]))
    rank = int(calls.argmax())
    exposed = _exposed(model, passes[slowest], sent, flows[slowest], rank)
    for axis in ended.late_by:
        exposed[axis] += float(ended.waited_by[axis][rank] + ended.late_by[axis][rank])
    update = float(ended.update[rank])
    return ScaleSimulation(
        layout=layout,
        step_s=step,
        compute_s=float(calls[rank]),
        exposed_s=exposed,
        bubble_s=step - float(calls[rank]) - sum(exposed.values()) - update - constant,
        optimizer_s=update,
        constant_s=constant,
        busy_s=calls,
        memory=_memory(model, stages, flows[slowest]),
        stages=stages,
        places=places,
        flow=everybody,
        endings=ended,
        classes=found,
        actions=sum(each.actions for each in flows.values()),
    )


def _exposed(model: _Model, passes: Sequence[Passes], sent: Traffic, through: Flow, rank: int) -> dict[str, float]:
    """Return seconds of collectives and messages on one rank during the passes, by axis."""
    count = through.micro_batches
    mine = [stage for stage, (on,) in enumerate(model.places) if on == rank]
    found = {
        axis: count * sum(passes[stage].sent_forward[axis] + passes[stage].sent_backward[axis] for stage in mine)
        for axis in NOTHING.sent_forward
    }
    messages = Counter(action.stage for action in through.walked.schedule.actions[rank] if action.op is Op.SEND)
    walked = through.walked.schedule.micro_batches
    found["pp"] = count * sum(float(sent.send[stage]) * messages[stage] / walked for stage in mine)
    found["dp"], found["fsdp"] = 0.0, count * sum(sum(model.gathered(passes[stage], sent, stage)) for stage in mine)
    return found


def _memory(model: _Model, stages: Stages, through: Flow) -> Footprint:
    """Return what each rank of the pipeline holds at its peak."""
    layout, blocks = model.layout, model.workload.blocks
    kept = {id(block): float(np.sum(kept_bytes(block, layout))) for block in blocks}
    activations = through.peak([sum(kept[id(block)] for block in of_stage) for of_stage in stages])
    found = []
    for rank in range(model.ranks):
        mine = [stage for stage, (on,) in enumerate(model.places) if on == rank]
        counts = Counter(id(block) for stage in mine for block in stages[stage])
        held = [(block, np.asarray(float(counts[id(block)]))) for block in blocks if counts[id(block)]]
        copies = np.asarray(0 not in mine)
        found.append(rank_footprint(model.workload, layout, held, copies, np.asarray(activations[rank])))
    names = [field.name for field in fields(Footprint)]
    return Footprint(**{name: np.array([float(np.sum(getattr(each, name))) for each in found]) for name in names})
