"""Traces of representatives, with the names that traces of real pipelines have."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.schedule import Op
from paceline.simulator.scale.layout import ScaleSimulation
from paceline.trace import GRADIENTS, UPDATE, Category, Event


def events(simulated: ScaleSimulation) -> Iterator[Event]:
    """Yield what the first rank of each stage of the slowest replicas does, all micro-batches walked for it."""
    found, ends = simulated.flow, simulated.endings
    walk = found.pipeline.walk(found.micro_batches)
    stride = int(simulated.layout.devices[0]) // int(simulated.layout.pp[0])
    for number, (actions, spans) in enumerate(zip(walk.schedule.actions, walk.times, strict=True)):
        rank = number * stride
        for action, (began, ended) in zip(actions, spans, strict=True):
            if action.op not in (Op.REDUCE, Op.UPDATE) and ended > began:
                yield Event(str(action), Category.PHASE, rank, began, ended)
        for stage, (on,) in enumerate(simulated.places):
            seconds = float(ends.sums[stage])
            if on == number and seconds:
                began = float(ends.began[stage])
                yield Event(f"sum of stage {stage}", Category.NETWORK, rank, began, began + seconds)
        summed, updated = float(ends.summed[number]), float(ends.summed[number] + ends.update[number])
        for name, began, ended in (
            (GRADIENTS, float(found.ended[number]), summed),
            (UPDATE, summed, updated),
            ("gather parameters", updated, float(ends.ended[number])),
        ):
            if ended > began:
                yield Event(name, Category.PHASE, rank, began, ended)
