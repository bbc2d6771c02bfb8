"""What ranks exchange inside of a step, as messages of a workload: read off programs placed on two ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import Node

from paceline.placement.origins import origins_of
from paceline.placement.redistribute import (
    collective_of,
    is_redistribution,
    redistribution_bytes,
    redistribution_of,
)
from paceline.placement.windows import window
from paceline.planner.amounts import Alongs, Amounts
from paceline.planner.dividing import Split
from paceline.program.program import Program
from paceline.program.views import is_view
from paceline.runtime.traffic import is_halo
from paceline.runtime.windows import sent_bytes
from paceline.simulator.workload import Along, Collective, Message, Pass

_GATHERED = 2
"""Things that go all the way round a ring for one call, at most: keys beside values, and gradients of both.

They travel as far as if they were gathered. On two ranks that is one turn for each; what is left, gradients that go
home, is a single message on any number of them.
"""


def messages(split: Split, amounts: Amounts, captured: Mapping[str, Node]) -> Iterator[tuple[str, Message]]:
    """Yield what two ranks exchange for each micro-batch, with the name of the captured call that it is made for.

    Gradients of parameters, loss and buffers are left out: they are added up once for all micro-batches.
    """
    program = split.placed.program
    ends, readers = _ends(program), split.readers
    turns: Counter[str] = Counter()
    for node in program.graph.nodes:
        when = Pass.BACKWARD if node.meta.get("backward") else Pass.FORWARD
        if is_redistribution(node) and node not in ends:
            x, source, target, _, parts = redistribution_of(node)
            kind = collective_of(source, target)
            if kind is not None:
                nbytes = redistribution_bytes(x.meta["val"], source, parts)
                along = _other(node, readers[node], amounts, captured, split.along)
                yield readers[node], Message(Collective(kind.value), split.along, amounts.of(nbytes, along), when)
        elif node.op == "call_function" and is_halo(node):
            along = _other(node.args[0], readers[node], amounts, captured, split.along)
            turns[readers[node]] += _is_turn(node)
            if _is_turn(node) and turns[readers[node]] <= _GATHERED:
                nbytes = node.meta["val"].nbytes * int(node.args[-1])
                yield readers[node], Message(Collective.ALL_GATHER, split.along, amounts.of(nbytes, along), when)
            else:  # rows at a border, as long as ever
                rows = amounts.of(sent_bytes(node), along - {Along.SP, Along.HW})
                yield readers[node], Message(Collective.SEND, split.along, rows, when)


def _is_turn(node: Node) -> bool:
    """Whether each rank gets the whole piece of the rank before: a turn of a ring, as many as there are other ranks."""
    arguments: Any = node.args
    x, _, first, step, length, edge = arguments[:6]
    return node.target is window and edge == "wrap" and abs(first) == step == length and isinstance(x, Node)


def _other(node: Node, reader: str, amounts: Amounts, captured: Mapping[str, Node], along: Along) -> Alongs:
    """Return what else than the axis itself a tensor divides along that is exchanged.

    One that a rule wrote, inside of a call, divides as the result of the call does.
    """
    origin = origins_of(node)[0]
    made = captured.get(origin.node)
    found = amounts.tensor(captured[reader]) if made is None else amounts.tensor(made, origin.index)
    return found - ({Along.TP, Along.REGION} if along is Along.TP else {along, Along.REGION})


def _ends(program: Program) -> set[Node]:
    """Return what becomes an output and nothing else, perhaps seen or moved another way."""
    results, last = set(program.results), program.output_node
    ends: set[Node] = set()
    for node in reversed(program.graph.nodes):
        users = [user for user in node.users if user is not last]
        leads = all(user in ends and (is_redistribution(user) or is_view(user)) for user in users)
        if node.op == "call_function" and leads and (users or node in results):
            ends.add(node)
    return ends
