"""Micro-batches of a serial reference, for modules to which a part of a batch is another thing than the whole.

Batch norm normalises what it is given, and dropout draws for it. A pipeline gives them micro-batches, so it is compared
with the unmodified module that accumulates gradients over the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.plan import Plan
from paceline.program.capture import Batch, batch_leaves
from paceline.program.program import OutputRole, Program
from paceline.program.random import is_random
from paceline.runtime.pipeline.pieces import count_for, micro_batch_seeds, micro_batches
from paceline.verify.serial import Division, Piece, program_inputs, undivided
from paceline.verify.subject import named_tensors


class Programs:
    """The captured programs of a module, one for each shape of a batch.

    Args:
        capture: captures the module on a batch.
    """

    def __init__(self, capture: Callable[[Batch], Program]) -> None:
        self._capture = capture
        self._found: dict[Any, Program] = {}

    def __call__(self, batch: Batch) -> Program:
        """Return the program for a batch."""
        leaves, structure = pytree.tree_flatten(batch)
        key = str(structure), tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if key not in self._found:
            self._found[key] = self._capture(batch)
        return self._found[key]


def couples_samples(program: Program) -> bool:
    """Whether parts of a batch, computed one after the other, give other numbers than all of it at once."""
    changes = any(output.role is OutputRole.BUFFER for output in program.outputs)
    return changes or any(is_random(node) for node in program.graph.nodes)


def division_for(plan: Plan, programs: Programs, module: nn.Module, batch: Batch) -> Division:
    """Return how the serial reference of a plan divides batches; not at all where that makes no difference."""
    parts = plan.mesh.batch_parts
    count = count_for(batch, plan, parts)
    if plan.mesh.stage_ranks == 1 or count == 1 or not couples_samples(programs(batch)):
        return undivided

    def divide(batch: Batch, seed: int) -> list[Piece]:
        pieces = micro_batches(batch, count, parts)
        weights = [weight_of(programs(piece), module, piece) for piece in pieces]
        seeds = micro_batch_seeds(seed, len(pieces))
        return [Piece(*found) for found in zip(pieces, seeds, (w / sum(weights) for w in weights), strict=True)]

    return divide


def weight_of(program: Program, module: nn.Module, batch: Batch) -> float:
    """Return what the loss of a batch is a mean over.

    Raises:
        PlanError: the program does not tell.
    """
    if program.weight is not None:
        return program.weight
    interpreter = program.interpreter()
    tensors = {name: tensor.detach() for name, tensor in named_tensors(module).items()}
    with torch.no_grad(), torch.random.fork_rng():
        results = interpreter.run(*program_inputs(program, tensors, batch_leaves(batch)), enable_io_processing=False)
    for output, result in zip(program.outputs, results, strict=True):
        if output.role is OutputRole.WEIGHT:
            return float(result)
    raise PlanError(
        "this loss is not a mean that Paceline can read off the program, so micro-batches cannot be weighted: verify "
        "with one micro-batch (--micro-batches 1)."
    )
