"""What a rank's memory holds at its peak, in closed form, for many layouts at once.

Megatron's account (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, sections
4 and 5): parameters, gradients and optimizer state by what is split over whom, and what each block keeps for its
backward pass times the micro-batches that a schedule has in flight. The first rank of a pipeline has most of these in
flight, the last one has the vocabulary: the one that needs more is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from paceline.simulator.closed_form.estimates import Footprint
from paceline.simulator.layouts import SCHEDULES, Flags, Layouts
from paceline.simulator.workload import Block, Numbers, Recompute, Workload

# Blocks whose parameters are there at once where each is gathered when it is needed: one computes, the next comes in.
_GATHERED = 2


@dataclass(frozen=True)
class _InFlight:
    """How many micro-batches a rank has in flight, at most: of its layers, of what is before and of what is after."""

    layers: Numbers
    before: Numbers
    after: Numbers


def footprint(workload: Workload, layouts: Layouts) -> Footprint:
    """Return the bytes that the rank which needs most holds at its peak, for each layout.

    Layers that do not divide by stages are counted as if the rank told had the larger share. Where several kinds of
    block repeat, every stage has an equal share of each.
    """
    first, last = footprints_of_ends(workload, layouts)
    most = first.total >= last.total
    return Footprint(
        **{
            field.name: np.where(most, getattr(first, field.name), getattr(last, field.name))
            for field in fields(Footprint)
        }
    )


def footprints_of_ends(workload: Workload, layouts: Layouts) -> tuple[Footprint, Footprint]:
    """Return what the first and the last rank of a pipeline hold at their peaks; the same where one rank is both."""
    wraps = layouts.schedule == SCHEDULES.index("zb-v")  # a V: the first rank has the last stage, too
    alone = (layouts.pp == 1) | wraps
    everyone = np.ones_like(alone)
    return (
        _on_rank(workload, layouts, _in_flight(layouts, first=True), everyone, alone),
        _on_rank(workload, layouts, _in_flight(layouts, first=False), layouts.pp == 1, ~wraps | (layouts.pp == 1)),
    )


def stage_layers(block: Block, layouts: Layouts) -> Numbers:
    """Return how many occurrences of a block the rank with most of them has, for each layout."""
    count = np.asarray(block.count, dtype=np.float64)
    if not block.repeats:
        return count
    return np.ceil(count / (layouts.pp * layouts.chunks)) * layouts.chunks


def _on_rank(workload: Workload, layouts: Layouts, flying: _InFlight, has_first: Flags, has_last: Flags) -> Footprint:
    """Return what a rank at an end of the pipeline holds."""
    held = _occurrences(workload, layouts, has_first, has_last)
    repeats = [block.repeats for block, _ in held]
    begin = repeats.index(True) if any(repeats) else len(repeats)
    kept = _sum(
        times
        * kept_bytes(block, layouts)
        * (flying.layers if block.repeats else flying.before if index < begin else flying.after)
        for index, (block, times) in enumerate(held)
    )
    return rank_footprint(workload, layouts, held, ~has_first, kept)


def rank_footprint(
    workload: Workload, layouts: Layouts, held: list[tuple[Block, Numbers]], copies: Flags, activations: Numbers
) -> Footprint:
    """Return what a rank with some blocks holds.

    Args:
        workload: which they belong to.
        layouts: how the step is split.
        held: blocks, each with how often it occurs on the rank.
        copies: whether parameters that blocks share with earlier ones are copies here.
        activations: bytes that are kept of all micro-batches in flight.
    """
    elements = _sum(times * _elements(block, layouts) for block, times in held)
    elements = elements + _sum(times * copies * _copied(block, layouts) for block, times in held)
    precision = workload.precision
    return Footprint(
        parameters=elements * precision.parameter / np.where(layouts.zero >= 3, layouts.fsdp, 1),
        gradients=elements * precision.gradient / np.where(layouts.zero >= 2, layouts.fsdp, 1),
        optimizer=elements * precision.optimizer / _sharing(layouts),
        activations=activations,
        buffers=_buffers(workload, layouts, held),
    )


def _sharing(layouts: Layouts) -> Numbers:
    """Return among how many ranks the optimizer's state is split.

    A distributed optimizer splits it among all that hold the same parameters: replicas and parts of the sequence.
    """
    among = np.where(layouts.fsdp > 1, layouts.fsdp, layouts.dp * layouts.sp)
    return np.where(layouts.zero >= 1, among, 1).astype(np.float64)


def _occurrences(
    workload: Workload, layouts: Layouts, has_first: Flags, has_last: Flags
) -> list[tuple[Block, Numbers]]:
    """Return each block with how often it occurs on the rank."""
    repeated = [index for index, block in enumerate(workload.blocks) if block.repeats]
    begin, end = (repeated[0], repeated[-1]) if repeated else (len(workload.blocks), -1)
    held = []
    for index, block in enumerate(workload.blocks):
        times = stage_layers(block, layouts)
        if index < begin:
            times = times * has_first
        elif index > end:
            times = times * has_last
        held.append((block, times))
    return held


def _in_flight(layouts: Layouts, *, first: bool) -> _InFlight:
    """Return how many micro-batches' activations the first or last rank holds at most, in units of all its stages'.

    For layers the same as `schedule.formulas.peak_activations`, over the stages of a rank. Of several stages on the
    first rank, the first one has a second group of micro-batches in flight when the first one is in all of them.
    """
    ranks, count, chunks = (each.astype(np.float64) for each in (layouts.pp, layouts.micro_batches, layouts.chunks))
    ahead = ranks - 1 if first else np.zeros_like(ranks)
    one_by_one = np.minimum(count, ahead + 1)
    ones = np.ones_like(ranks)

    def by_schedule(**values: Numbers) -> Numbers:
        chosen = [values[name.replace("-", "_").replace("1f1b", "one_f_one_b")] for name in SCHEDULES]
        which = [layouts.schedule == index for index in range(len(SCHEDULES))]
        return np.asarray(np.select(which, chosen), dtype=np.float64)

    bounded = np.minimum(count, ranks)
    interleaved = np.minimum(chunks * count, 1 + 2 * ahead + (chunks - 1) * ranks) / chunks
    groups = np.minimum(count, 2 * ranks - 1)
    return _InFlight(
        layers=by_schedule(one_f_one_b=one_by_one, gpipe=count, interleaved=interleaved, zb_h1=bounded, zb_v=bounded),
        before=by_schedule(one_f_one_b=one_by_one, gpipe=count, interleaved=groups, zb_h1=bounded, zb_v=bounded),
        after=by_schedule(one_f_one_b=ones, gpipe=count, interleaved=ones, zb_h1=bounded, zb_v=bounded),
    )


def _elements(block: Block, layouts: Layouts) -> Numbers:
    return _sum(piece.on(layouts) for piece in block.parameters)


def _copied(block: Block, layouts: Layouts) -> Numbers:
    return _sum(piece.on(layouts) for piece in block.shared)


def kept_bytes(block: Block, layouts: Layouts, policy: Recompute | None = None) -> Numbers:
    """Return bytes that one occurrence keeps of one micro-batch, under a policy or else each layout's own."""
    if policy is not None:
        return _sum(piece.on(layouts) for piece in block.kept[policy])
    return np.select(
        [layouts.recompute == one.value for one in Recompute], [kept_bytes(block, layouts, one) for one in Recompute]
    )


def _buffers(workload: Workload, layouts: Layouts, held: list[tuple[Block, Numbers]]) -> Numbers:
    """Return bytes of what comes and goes: gathered parameters, whole gradients, what a block needs while it runs."""
    largest = _largest(_elements(block, layouts) * (times > 0) for block, times in held)
    gathers = (layouts.zero >= 3) & (layouts.fsdp > 1)
    scatters = (layouts.zero >= 2) & (layouts.fsdp > 1)
    again = _largest(
        np.maximum(kept_bytes(block, layouts, Recompute.NONE) - kept_bytes(block, layouts), 0) * (times > 0)
        for block, times in held
    )
    working = _largest(block.workspace.on(layouts) * (times > 0) for block, times in held)
    return (
        gathers * _GATHERED * largest * workload.precision.parameter
        + scatters * largest * workload.precision.gradient
        + np.maximum(again, working)
    )


def _sum(amounts: Iterable[Numbers]) -> Numbers:
    total: Numbers = np.zeros(())
    for amount in amounts:
        total = total + amount
    return total


def _largest(amounts: Iterable[Numbers]) -> Numbers:
    largest: Numbers = np.zeros(())
    for amount in amounts:
        largest = np.maximum(largest, amount)
    return largest
