"""The backward pass of a stage in two halves: what other stages wait for, and the gradients of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from paceline.program.stages.extract import extract, needed
from paceline.program.stages.kinds import is_cheap, is_item
from paceline.program.stages.pipeline import Part
from paceline.program.stages.reading import Reading


@dataclass(frozen=True)
class Halves:
    """The two parts, and what the first leaves for the second."""

    input: Part
    weight: Part
    kept: tuple[Node, ...]


def halve(reading: Reading, sent: Sequence[Node], gradients: Mapping[str, Node], given: Collection[Node]) -> Halves:
    """Split the backward pass of a stage that makes gradients and what it sends.

    The second half makes the gradients of parameters out of those of what their forward calls gave. So the first stage,
    which sends nothing, has two halves as well.
    """
    making = needed([*sent, *gradients.values()], given)
    later = _later(reading, making, needed(sent, given), gradients)
    first = {node for node in making if reading.is_gradient(node) and node not in later}
    by_first = needed([*sent, *first], given) if first or sent else set()
    kept = _kept(reading, later, gradients.values(), first, by_first, given)
    ordered = sorted(kept, key=reading.order.__getitem__)
    return Halves(
        extract(reading, [*sent, *ordered], given, backward=True),
        extract(reading, gradients.values(), {*given, *kept}, backward=True),
        tuple(ordered),
    )


def _later(reading: Reading, making: set[Node], for_others: set[Node], gradients: Mapping[str, Node]) -> set[Node]:
    """Return the gradients that nobody waits for: of the very calls that read the parameters that they lead to."""
    leads: dict[Node, set[str]] = {node: set() for node in making}
    for name, node in gradients.items():
        leads.setdefault(node, set()).add(name)
    ordered = sorted(making, key=reading.order.__getitem__)
    for node in reversed(ordered):
        for user in node.users:
            leads[node] |= leads[user] if user in making else set()
    found: set[Node] = set()
    for node in ordered:
        if is_item(node):
            found |= {node} if node.all_input_nodes[0] in found else set()
        elif reading.is_gradient(node) and node not in for_others:
            sequence, names = node.meta.get("sequence"), leads[node]
            follows = any(source in found for source in node.all_input_nodes)
            if follows or (names and all(sequence in reading.sequences.get(name, ()) for name in names)):
                found.add(node)
    return found


def _kept(
    reading: Reading,
    later: set[Node],
    gradients: Iterable[Node],
    first: set[Node],
    by_first: set[Node],
    given: Collection[Node],
) -> set[Node]:
    kept = set()
    waiting = [*gradients, *(source for node in later for source in node.all_input_nodes)]
    seen = set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or node in given or node in later or node.op == "placeholder":
            continue
        seen.add(node)
        source = node.all_input_nodes[0] if is_item(node) else node  # what is kept is a tensor, never a tuple
        again = not reading.is_gradient(source) and (is_cheap(source) or not source.all_input_nodes)
        if source in first or (source in by_first and not again):
            kept.add(node)
        else:
            waiting += node.all_input_nodes
    return kept
