"""What a rank holds between the passes of a step, as the solver counts it when a plan limits memory."""

from __future__ import annotations

from torch.fx import Node

from paceline.placement.calls import Ref
from paceline.placement.placements import Shard
from paceline.placement.problem import Problem
from paceline.placement.rules import Strategy
from paceline.program.program import InputRole

_PER_PARAMETER = 4
"""Values a rank holds for each element of a parameter: itself, its gradient, and two of an optimizer such as Adam."""


def held_bytes(problem: Problem) -> dict[Ref, int]:
    """Return the tensors that outlive the forward pass, and their bytes before this axis splits them.

    Those are parameters, with gradients and optimizer state, and what the backward pass reads and does not compute
    again. Views are counted as what they are views of.
    """
    found = {
        Ref(node, 0): _PER_PARAMETER * Ref(node, 0).bytes
        for node, item in problem.input_of.items()
        if item.role is InputRole.PARAMETER
    }
    for node, inputs in problem.inputs.items():
        if node.meta.get("backward"):
            for root in map(problem.root, inputs):
                if root.node not in problem.input_of and _outlives(root.node):
                    found[root] = root.bytes
    return found


def _outlives(node: Node) -> bool:
    kept = node.op == "call_function" and not node.meta.get("backward")
    return kept and not node.meta.get("rematerialize")


def held_by(strategy: Strategy, node: Node, held: dict[Ref, int], parts: int) -> float:
    """Return the bytes that one rank holds of what a node makes with a strategy."""
    return sum(
        held.get(Ref(node, index), 0) / (parts if isinstance(placement, Shard) else 1)
        for index, placement in enumerate(strategy.outputs)
    )
