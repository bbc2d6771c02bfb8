"""What a step communicates, read off the graphs that run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch.fx import Graph

from paceline.runtime.pipeline.step import Edges, PipelineStep
from paceline.runtime.traffic import exchanges

SEND = "send"


@dataclass(frozen=True)
class Volume:
    """How often a kind of collective is called on each rank, and the bytes that a rank hands to it in all."""

    count: int = 0
    bytes: int = 0


def traffic(graph: Graph | None) -> dict[str, Volume]:
    """Return the collectives of one pass of a step, by kind.

    A bucket is one collective. Bytes are those of the tensor that is handed over: the shard for an all-gather, all
    terms for a reduce-scatter or an all-reduce. What of it crosses a link depends on the algorithm. For a halo they are
    the rows that are sent, by the rank that sends most.
    """
    found: dict[str, Volume] = {}
    for exchange in exchanges(graph) if graph is not None else ():
        before = found.get(exchange.kind, Volume())
        found[exchange.kind] = Volume(before.count + 1, before.bytes + exchange.bytes)
    return dict(sorted(found.items()))


def pipeline_traffic(
    steps: Sequence[PipelineStep], stages: Iterable[int]
) -> tuple[dict[str, Volume], dict[str, Volume]]:
    """Return what a pipeline rank communicates forward and backward, in all micro-batches, with those of its stages.

    A message between stages is a `send`, also where both lie on one rank. Sums of gradients over the ranks of a stage
    count as backward.
    """
    forward: dict[str, Volume] = {}
    backward: dict[str, Volume] = {}
    for stage in stages:
        for step in steps:
            found = step.pipeline.stages[stage]
            halves = (found.backward_input, found.backward_weight)
            passes = halves if found.backward_input is not None else (found.backward,)
            _add(forward, traffic(found.forward.graph))
            for part in passes:
                _add(backward, traffic(None if part is None else part.graph))
            _add(forward, _sends(step, step.pipeline.forward_edges, stage))
            _add(backward, _sends(step, step.pipeline.backward_edges, stage))
        reduction = steps[0].reductions[stage]
        _add(backward, traffic(None if reduction is None else reduction.graph))
    return dict(sorted(forward.items())), dict(sorted(backward.items()))


def _sends(step: PipelineStep, edges: Edges, stage: int) -> dict[str, Volume]:
    names = [name for (source, _), found in edges.items() if source == stage for name in found]
    sent = [step.sent[name] for name in names]
    return {SEND: Volume(len(sent), sum(prod(x.shape) * x.dtype.itemsize for x in sent))} if sent else {}


def _add(total: dict[str, Volume], found: dict[str, Volume]) -> None:
    for kind, volume in found.items():
        before = total.get(kind, Volume())
        total[kind] = Volume(before.count + volume.count, before.bytes + volume.bytes)
