"""A program becomes a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from paceline.errors import PlanError
from paceline.program.program import Program
from paceline.program.stages.assign import assign
from paceline.program.stages.boundaries import at_modules, at_nodes, check_same
from paceline.program.stages.choose import choose, weigh
from paceline.program.stages.groups import groups
from paceline.program.stages.homes import at_homes
from paceline.program.stages.pipeline import Pipeline
from paceline.program.stages.prepare import prepare
from paceline.program.stages.reading import Reading
from paceline.program.stages.seconds import seconds_of as rough_seconds
from paceline.program.stages.write import Writer


def cut(
    program: Program,
    count: int,
    *,
    boundaries: Sequence[str] = (),
    split_backward: bool = False,
    seconds_of: Callable[[Node], float] = rough_seconds,
    memory_bytes: float | None = None,
    same_as: Pipeline | None = None,
) -> Pipeline:
    """Cut a program into stages; `program` stays as it is.

    Args:
        program: of one micro-batch, captured or placed. Forward calls that are marked `rematerialize` are made again in
            the backward part that reads them.
        count: the number of stages.
        boundaries: names of the modules with which stages 1 and up begin; chosen by cost if there are none.
        split_backward: also make the backward pass of each stage in two halves.
        seconds_of: how long a call takes.
        memory_bytes: what a stage may hold: its parameters, gradients and moments of an optimizer, and what it saves
            for one micro-batch.
        same_as: the pipeline of the same module for micro-batches of another shape, or for evaluation: each stage reads
            the parameters that it reads there.

    Raises:
        PlanError: the program cannot be cut so; the message says what can be.
    """
    if count < 1:
        raise PlanError(f"a pipeline of {count} stages was asked for; it has at least 1.")
    program, copies = prepare(program, split_masks=split_backward)
    reading = Reading(program)
    together = groups(reading, copies)
    weights = weigh(reading, together, seconds_of)
    if same_as is not None:
        homes = at_homes(reading, together, same_as)
        starts = at_nodes(together, same_as.cuts, count) if homes is None else homes
    elif boundaries:
        starts = at_modules(together, boundaries, count)
    else:
        starts = choose(weights, count, memory_bytes)
    assignment = assign(reading, together, starts)
    cuts = tuple(together[start].nodes[0].name for start in starts)
    pipeline = Writer(reading, assignment, copies).pipeline(cuts, seconds_of, split_backward=split_backward)
    if same_as is not None and homes is None:
        check_same(pipeline, same_as)
    return pipeline
