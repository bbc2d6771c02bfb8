"""A program becomes a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from paceline.errors import PlanError
from paceline.program.program import Program
from paceline.program.stages.assign import assign
from paceline.program.stages.boundaries import are_alike, at_modules, at_nodes
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
    pieces = _Pieces(program, split_backward)
    if same_as is not None:
        return _cut_as(pieces, same_as, count, seconds_of)
    if boundaries:
        starts = at_modules(pieces.groups, boundaries, count)
    else:
        starts = choose(weigh(pieces.reading, pieces.groups, seconds_of), count, memory_bytes)
    return pieces.cut(starts, seconds_of)


class _Pieces:
    """A copy of a program, read for being cut once."""

    def __init__(self, program: Program, split_backward: bool) -> None:
        self.program = program
        self.split_backward = split_backward
        copy, self._copies = prepare(program, split_masks=split_backward)
        self.reading = Reading(copy)
        self.groups = groups(self.reading, self._copies)

    def cut(self, starts: Sequence[int], seconds_of: Callable[[Node], float]) -> Pipeline:
        assignment = assign(self.reading, self.groups, starts)
        cuts = tuple(self.groups[start].nodes[0].name for start in starts)
        writer = Writer(self.reading, assignment, self._copies)
        return writer.pipeline(cuts, seconds_of, split_backward=self.split_backward)


def _cut_as(pieces: _Pieces, model: Pipeline, count: int, seconds_of: Callable[[Node], float]) -> Pipeline:
    """Cut at the calls that another pipeline was cut at, or else so that stages have the parameters that they have."""
    if len(model.stages) != count:
        raise PlanError(f"{count} stages were asked for, like those of a pipeline that has {len(model.stages)}.")
    starts = at_nodes(pieces.groups, model.cuts)
    if starts is not None:
        pipeline = pieces.cut(starts, seconds_of)
        if are_alike(pipeline, model):
            return pipeline
        pieces = _Pieces(pieces.program, pieces.split_backward)
    starts = at_homes(pieces.reading, pieces.groups, model)
    if starts is None:
        raise PlanError(
            f"the program of micro-batches of another shape, or of evaluation, cannot be cut into {count} stages like "
            "the first: it reads parameters in another order. Choose micro-batches that are all of one shape, or other "
            "boundaries."
        )
    return pieces.cut(starts, seconds_of)
