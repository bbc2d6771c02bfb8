"""What a rule writes a strategy with that is more than its operator on pieces."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from paceline.placement.evaluation import Evaluator
from paceline.placement.located import coordinate
from paceline.placement.origins import ORIGINS, UNKNOWN
from paceline.placement.placements import Placement
from paceline.placement.redistribute import redistribute


class Writer:
    """Appends calls to the graph of one rank.

    Attributes:
        axis: the axis that is being placed.
        parts: its ranks.
    """

    def __init__(self, graph: Graph, evaluator: Evaluator, axis: str, parts: int, meta: dict[str, Any]) -> None:
        self.axis = axis
        self.parts = parts
        self._graph = graph
        self._evaluator = evaluator
        self._meta = meta

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Call an operator, or a function that the runtime binds, on local pieces."""
        node = self._graph.call_function(target, args, kwargs)
        value = self._evaluator.of(node)
        count = len(value) if isinstance(value, (list, tuple)) else 1
        node.meta = {**self._meta, "val": value, ORIGINS: (UNKNOWN,) * count}
        return node

    def item(self, node: Node, index: int) -> Node:
        """Return one of the results of a call that has several."""
        return self.call(operator.getitem, node, index)

    def redistribute(self, node: Node, source: Placement, target: Placement) -> Node:
        """Change where a tensor lives along the axis."""
        return self.call(redistribute, node, source, target, self.axis, self.parts)

    def coordinate(self) -> Node:
        """Where the rank stands along the axis, as a tensor of no dimensions."""
        return self.call(coordinate, self.axis, self.parts)
