"""A captured step as a row of segments: the blocks that repeat, and what comes before, between and after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from paceline.program.program import InputRole
from paceline.program.repeated import Repeat, RepeatedProgram, modules


@dataclass
class Segment:
    """A part of a step.

    Attributes:
        name: for people.
        count: how often it occurs.
        nodes: of one occurrence, each with how many calls it stands for.
        parameters: those that it is the first to read, with how many each stands for.
        shared: those that an earlier segment reads, too.
        first, last: the calls of the first occurrence and of the last, which have other neighbours.
    """

    name: str
    count: int
    nodes: dict[Node, int] = field(default_factory=dict)
    parameters: dict[Node, int] = field(default_factory=dict)
    shared: list[Node] = field(default_factory=list)
    first: list[Node] = field(default_factory=list)
    last: list[Node] = field(default_factory=list)


def segments(repeated: RepeatedProgram) -> list[Segment]:
    """Return the segments in the order of the forward pass; of blocks, the typical one."""
    graph = repeated.program.graph
    outer = _outermost(repeated.repeats)
    of_module = modules(graph)
    found = [Segment("", 1)]
    for repeat in outer:
        found += [Segment(_starred(repeat), len(repeat.paths)), Segment("", 1)]
    place: dict[Node, int] = {}
    begun = 0
    by_sequence: dict[int, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        number = _repeat_of(of_module[node], outer)
        sequence = node.meta.get("sequence")
        if number is not None:
            begun = max(begun, number + 1)
            place[node] = 2 * number + 1
        elif not node.meta.get("backward"):
            place[node] = 2 * begun
            by_sequence.setdefault(sequence, 2 * begun)
        elif sequence in by_sequence:
            place[node] = by_sequence[sequence]
        else:
            sources = [place[source] for source in node.all_input_nodes if source in place]
            place[node] = sources[-1] if sources else 2 * begun
        if number is not None and _is_within(of_module[node], outer[number].kept[0]):
            found[place[node]].first.append(node)
        if number is not None and _is_within(of_module[node], outer[number].kept[-1]):
            found[place[node]].last.append(node)
        if number is None or _is_within(of_module[node], outer[number].typical):
            inside = 1 if number is None else outer[number].weights[outer[number].typical]
            found[place[node]].nodes[node] = repeated.weight(of_module[node]) // inside
    _share_parameters(repeated, outer, found, place)
    for position, segment in enumerate(found):
        segment.name = segment.name or _named(segment, of_module, position == 0)
    return [segment for segment in found if segment.nodes or segment.parameters]


def _share_parameters(
    repeated: RepeatedProgram, outer: Sequence[Repeat], found: Sequence[Segment], place: dict[Node, int]
) -> None:
    """Give each parameter to the segment that reads it first, and tell those that read it later."""
    program = repeated.program
    for item, node in zip(program.inputs, program.placeholders, strict=True):
        if item.role is not InputRole.PARAMETER:
            continue
        number = _repeat_of(item.name, outer)
        if number is not None:
            typical = outer[number].typical
            if _is_within(item.name, typical):
                weight = repeated.weight(item.name.rpartition(".")[0]) // outer[number].weights[typical]
                found[2 * number + 1].parameters[node] = weight
            continue
        readers = sorted({place[user] for user in node.users if user in place and not user.meta.get("backward")})
        first = readers[0] if readers else 0
        found[first].parameters[node] = 1
        for later in readers[1:]:
            found[later].shared.append(node)


def _outermost(repeats: Sequence[Repeat]) -> list[Repeat]:
    """Return the sets of blocks that lie in no other block."""
    return [
        repeat
        for repeat in repeats
        if not any(
            _is_within(repeat.paths[0], path) for other in repeats if other is not repeat for path in other.paths
        )
    ]


def _repeat_of(path: str, outer: Sequence[Repeat]) -> int | None:
    return next(
        (number for number, repeat in enumerate(outer) if any(_is_within(path, kept) for kept in repeat.kept)), None
    )


def _is_within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _starred(repeat: Repeat) -> str:
    """Return `blocks.*` for blocks; where only some of a list are equal, the name says which is meant."""
    parent, _, _ = repeat.paths[0].rpartition(".")
    return f"{parent}.*" if parent else "*"


def _named(segment: Segment, of_module: dict[Node, str], is_first: bool) -> str:
    """Return the names of the modules that have parameters there, or of all that compute there."""
    names = [node.name for node in segment.parameters]
    readers = [user for node in segment.parameters for user in node.users if user in segment.nodes]
    paths = dict.fromkeys(of_module[user] for user in readers if of_module[user])
    if names and paths:
        return ", ".join(list(paths)[:3]) + (", .." if len(paths) > 3 else "")
    return "inputs" if is_first else "outputs"
