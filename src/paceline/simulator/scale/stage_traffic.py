"""What the stages of a pipeline send: to each other, and among the replicas of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paceline.cluster.cluster import Cluster
from paceline.cluster.collectives import collective_seconds
from paceline.schedule.places import Replicas
from paceline.simulator.closed_form.gradient_sums import exchanges
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Block, Numbers, Workload

_SHARDED = 3  # the stage of ZeRO that splits parameters


@dataclass(frozen=True)
class Traffic:
    """Seconds of what each stage sends, arrays over stages.

    Attributes:
        parameters: elements on one rank, before `fsdp` splits them.
        send: of a message to another stage, which keeps the sender.
        arrival: after that, until it is there.
        gather: of its parameters for one pass of one micro-batch, where these are split.
        scatter: of its gradients after one micro-batch, where these are.
        sums: of gradients among replicas once in a step, beside which passes may run, by axis.
        late: of updated parameters, after the update, by axis.
    """

    parameters: Numbers
    send: Numbers
    arrival: float
    gather: Numbers
    scatter: Numbers
    sums: dict[str, Numbers]
    late: dict[str, Numbers]


def traffic(
    workload: Workload, layout: Layouts, cluster: Cluster, stages: Sequence[Sequence[Block]], places: Replicas
) -> Traffic:
    """Return what stages send.

    Args:
        workload: they are of.
        layout: one.
        cluster: its slowest links count.
        stages: the blocks of each.
        places: the rank of the pipeline that has it.
    """
    rates = cluster.slowest.device.rates
    parameters = np.array([_parameters(blocks, layout, first=not stage) for stage, blocks in enumerate(stages)])
    nothing = np.zeros(len(stages))
    gather, scatter = nothing, nothing
    sums, late = ({"dp": nothing, "fsdp": nothing} for _ in range(2))
    sharded = bool(layout.fsdp[0] > 1 and layout.zero[0] == _SHARDED)
    micro_batches = int(layout.micro_batches[0])
    for exchange in exchanges(parameters, layout, workload.precision):
        seconds = rates.exchange * exchange.seconds(cluster)
        if sharded and exchange.axis == "fsdp" and exchange.kind == "reduce_scatter":
            scatter = scatter + seconds / micro_batches
        elif sharded and exchange.axis == "fsdp":
            gather = gather + seconds / (2 * micro_batches)
        else:
            into = sums if exchange.hidden else late
            into[exchange.axis] = into[exchange.axis] + seconds
    each = _messages(layout, cluster, stages, places)
    return Traffic(
        parameters=parameters,
        send=rates.transfer * each,
        arrival=max(1 - rates.transfer, 0.0) * float(each.max(initial=0.0)),
        gather=gather,
        scatter=scatter,
        sums=sums,
        late=late,
    )


def _parameters(blocks: Sequence[Block], layout: Layouts, *, first: bool) -> float:
    """Return elements of a stage; what it shares with an earlier one is a copy."""
    pieces = [piece for block in blocks for piece in (*block.parameters, *(() if first else block.shared))]
    return float(sum((piece.on(layout).sum() for piece in pieces), start=0.0))


def _messages(layout: Layouts, cluster: Cluster, stages: Sequence[Sequence[Block]], places: Replicas) -> Numbers:
    """Return seconds of a message of each stage: the mean of what it sends to the next one and to the one before."""
    stride = int(layout.devices[0]) // int(layout.pp[0])
    sizes = np.array([float(blocks[-1].output.on(layout).sum()) for blocks in stages[:-1]])
    seconds = collective_seconds(cluster, "send", sizes, 2, stride) if len(sizes) else sizes
    crosses = np.array([left != right for left, right in pairwise(places)], dtype=np.float64)
    forward, backward = np.append(seconds * crosses, 0.0), np.insert(seconds * crosses, 0, 0.0)
    count = np.append(crosses, 0.0) + np.insert(crosses, 0, 0.0)
    return np.asarray((forward + backward) / np.maximum(count, 1.0))
