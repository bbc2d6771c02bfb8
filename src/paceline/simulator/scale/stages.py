"""Stages of a pipeline in numbers: what each one's passes take with one micro-batch, and where stages begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.errors import PlanError
from paceline.simulator.closed_form.demands import AXES, block_demand
from paceline.simulator.closed_form.device_seconds import block_times, pass_seconds
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Along, Block, Kind, Numbers, Pass, Recompute, Work, Workload

_EVEN = 1e-9


@dataclass(frozen=True)
class Passes:
    """Seconds of a block, or of several, with one micro-batch on one rank.

    Attributes:
        forward, backward: of calls; what is computed again counts with the backward pass.
        weights: the part of the backward pass that makes gradients of parameters, which nobody waits for.
        sent_forward, sent_backward: of collectives in each pass, by axis.
    """

    forward: float
    backward: float
    weights: float
    sent_forward: Mapping[str, float]
    sent_backward: Mapping[str, float]

    @property
    def whole_forward(self) -> float:
        """With its collectives."""
        return self.forward + sum(self.sent_forward.values())

    @property
    def whole_backward(self) -> float:
        """With its collectives."""
        return self.backward + sum(self.sent_backward.values())

    @property
    def total(self) -> float:
        """Both passes with their collectives."""
        return self.whole_forward + self.whole_backward

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
            {axis: seconds + other.sent_forward[axis] for axis, seconds in self.sent_forward.items()},
            {axis: seconds + other.sent_backward[axis] for axis, seconds in self.sent_backward.items()},
        )

    def scaled(self, factor: float, network: float | None = None) -> Passes:
        """Return it with computing, and everything or else the network too, so many times longer."""
        sent = factor if network is None else network
        return Passes(
            factor * self.forward,
            factor * self.backward,
            factor * self.weights,
            {axis: sent * seconds for axis, seconds in self.sent_forward.items()},
            {axis: sent * seconds for axis, seconds in self.sent_backward.items()},
        )


NOTHING = Passes(0.0, 0.0, 0.0, dict.fromkeys(AXES.values(), 0.0), dict.fromkeys(AXES.values(), 0.0))
"""What no block takes."""


def block_passes(block: Block, layout: Layouts, cluster: Cluster, dtype: str) -> Passes:
    """Return the seconds of one occurrence of a block on the slowest devices of a cluster."""
    group = cluster.slowest
    demand = block_demand(block, layout, cluster)
    times = block_times(demand, group, dtype)
    device = _number(pass_seconds(demand.backward, group.device, dtype))
    makes = replace(block, work=tuple(filter(makes_gradients_of_parameters, block.work)), messages=())
    weights = _number(pass_seconds(block_demand(makes, layout, cluster).backward, group.device, dtype))
    backward = _number(times.backward)
    ahead = replace(block, work=(), messages=tuple(each for each in block.messages if each.when is Pass.FORWARD))
    once = replace(layout, recompute=np.full_like(layout.recompute, Recompute.NONE.value))
    alone = {axis: _number(seconds) for axis, seconds in block_demand(ahead, once, cluster).network.items()}
    whole = {axis: _number(seconds) for axis, seconds in demand.network.items()}
    added = {axis: _number(seconds) for axis, seconds in times.exposed.items()}
    forward = {axis: added[axis] * alone[axis] / whole[axis] if whole[axis] else 0.0 for axis in added}
    return Passes(
        forward=_number(times.forward),
        backward=backward,
        weights=backward * min(weights / device, 1.0) if device else 0.0,
        sent_forward=forward,
        sent_backward={axis: added[axis] - forward[axis] for axis in added},
    )


def makes_gradients_of_parameters(work: Work) -> bool:
    """Whether a call is a product that sums over the samples of a batch: no earlier stage waits for it."""
    return work.kind is Kind.PRODUCT and work.when is Pass.BACKWARD and Along.BATCH in work.dims[-1].along


def occurrences(workload: Workload) -> tuple[Block, ...]:
    """Return the blocks of a model one after the other, those that repeat as often as they do."""
    return tuple(block for block in workload.blocks for _ in range(round(_number(block.count))))


def divide(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return where stages begin, so that the slowest is as quick as can be, and the others as even as can be.

    Args:
        seconds: of each block, in order; none is divided.
        stages: how many there are.

    Raises:
        PlanError: there are more stages than blocks.
    """
    count = len(seconds)
    if stages > count:
        raise PlanError(
            f"{count} blocks cannot be {stages} stages of a pipeline: each stage needs one. Take at most {count} "
            "ranks times chunks."
        )
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    spans = ends[None, :] - ends[:, None]  # of a stage from one block to another
    spans[np.tril_indices(count + 1)] = np.inf
    slowest = _best(spans, stages, np.maximum)[0]
    allowed = np.where(spans <= slowest * (1 + _EVEN), spans**2, np.inf)
    return _best(allowed, stages, np.add)[1]


def _best(spans: Numbers, stages: int, joined: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """Return the least value of all divisions, joined over their stages, and where the stages of one of them begin."""
    value = spans[0]  # of a first stage up to each block
    chosen: list[np.ndarray[tuple[int], np.dtype[np.intp]]] = []
    for _ in range(stages - 1):
        candidates = joined(value[:, None], spans)
        chosen.append(candidates.argmin(axis=0))
        value = candidates.min(axis=0)
    end, begins = len(spans) - 1, []
    for choice in reversed(chosen):
        end = int(choice[end])
        begins.append(end)
    return float(value[-1]), (0, *reversed(begins))


def _number(values: object) -> float:
    """Return the only number of an array."""
    return float(np.asarray(values, dtype=np.float64).reshape(-1)[0])
