"""What the forward pass keeps for the backward pass: storages, read off the two passes as the runtime cuts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from paceline.placement.calls import results
from paceline.placement.origins import origins_of
from paceline.program.fake import own_values, storage_key
from paceline.program.program import Program
from paceline.runtime.passes.partition import partition
from paceline.runtime.passes.recompute import recompute_in_backward


@dataclass(frozen=True)
class Saved:
    """Memory that is kept between the passes.

    Attributes:
        node, index: the tensor of the captured program that was the first in it.
        nbytes: of the storage.
    """

    node: str
    index: int
    nbytes: int


def saved(program: Program) -> Iterator[Saved]:
    """Yield what a program, captured or placed, keeps between its passes, views once. The program is used up."""
    recompute_in_backward(program.graph)
    parts = partition(program)
    graph = parts.forward
    own_values(graph)
    makers: dict[int, tuple[Node, int, Tensor]] = {}
    given: set[int] = set()
    for node in graph.nodes:
        for index, value in enumerate(results(node)):
            if value is None:
                continue
            if node.op != "call_function":
                given.add(storage_key(value))
            elif storage_key(value) not in given:
                makers.setdefault(storage_key(value), (node, index, value))
    (values,) = next(node for node in reversed(graph.nodes) if node.op == "output").args
    kept = {
        storage_key(value)
        for node in values[len(parts.forward_outputs) :]  # the partition's outputs are a tuple
        for value in results(node)
        if value is not None
    }
    for key, (node, index, value) in makers.items():
        if key in kept:
            origin = origins_of(node)[index]
            yield Saved(origin.node, origin.index, value.untyped_storage().nbytes())
