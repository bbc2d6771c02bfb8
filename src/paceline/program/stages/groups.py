"""Which forward calls must stay together, and so where a program may be cut."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from paceline.program.program import Output, OutputRole
from paceline.program.stages.kinds import is_item
from paceline.program.stages.reading import Reading

_Key = tuple[str, Hashable]
_SEQUENCE, _BUFFER = "sequence", "buffer"
_LONGEST = 32
"""Calls of a sequence that are further apart may be cut: what needs no gradient has the number of what came before."""


@dataclass(frozen=True)
class Group:
    """Consecutive forward calls that one stage makes.

    Attributes:
        nodes: in order.
        buffers: names of buffers that the group reads first and changes last, and may not be cut between.
    """

    nodes: tuple[Node, ...]
    buffers: tuple[str, ...]


def groups(reading: Reading, copies: Mapping[str, Node]) -> list[Group]:
    """Return the forward calls in groups, in order.

    Calls that autograd differentiates as one stay together, as do a call and its several results. The first reader of a
    buffer is in the stage that changes it last. The loss and all after it are the last group.
    """
    place = {node: i for i, node in enumerate(reading.body)}
    ranges: dict[_Key, tuple[int, int]] = {}
    for key, node in _together(reading, copies):
        if node in place:
            first, last = ranges.get(key, (place[node], place[node]))
            ranges[key] = min(first, place[node]), max(last, place[node])
    ends = list(range(len(reading.body)))
    for key, (first, last) in ranges.items():
        if last - first <= _LONGEST or key[0] != _SEQUENCE:
            ends[first] = max(ends[first], last)
    found: list[Group] = []
    begin, end = 0, -1
    for position in range(len(reading.body)):
        end = max(end, ends[position])
        if position == end:
            held = ((name, *ranges.get((_BUFFER, name), (0, 0))) for name in copies)
            buffers = tuple(name for name, first, last in held if begin <= first < last <= end)
            found.append(Group(tuple(reading.body[begin : end + 1]), buffers))
            begin = end + 1
    return found


def _together(reading: Reading, copies: Mapping[str, Node]) -> Iterable[tuple[_Key, Node]]:
    differentiated = {node.meta.get("sequence") for node in reading.gradients} - {None}
    for node in reading.body:
        if node.meta.get("sequence") in differentiated:
            yield (_SEQUENCE, node.meta["sequence"]), node
        if is_item(node):
            (source,) = node.all_input_nodes
            yield ("results", source), node
            yield ("results", source), source
    for name, copy in copies.items():
        yield (_BUFFER, name), copy
        yield (_BUFFER, name), reading.result_of[Output(OutputRole.BUFFER, name)]
    loss = next(node for output, node in reading.result_of.items() if output.role is OutputRole.LOSS)
    for node in (loss, *reading.body[-1:]):
        yield ("loss", None), node


def groups_of(found: Iterable[Group]) -> dict[Node, int]:
    """Return the number of the group that each forward call is in."""
    return {node: number for number, group in enumerate(found) for node in group.nodes}
