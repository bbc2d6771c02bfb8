"""Capture at a cost that does not grow with the number of equal blocks.

Of siblings that compute the same, three are captured, and the others stand aside: they hand on what they are given.
What comes out is a program like any other, of a model with fewer blocks but of the same shapes, which can be placed and
walked; and each of its calls stands for as many as its module's weight says. The user's module, and the loop that calls
its blocks, stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.fx import Graph, Node

from paceline.errors import CaptureError
from paceline.program.aside import standing_aside
from paceline.program.capture import Batch, capture
from paceline.program.program import Program
from paceline.program.rehearsal import Equals, equals
from paceline.program.repeats import siblings


@dataclass(frozen=True)
class Repeat:
    """Sub-modules that compute the same.

    Attributes:
        paths: of all of them, in the order in which they are called.
        kept: of those that are in the program: the first, one whose neighbours are like itself, and the last.
    """

    paths: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def typical(self) -> str:
        """The one that stands for those that are not in the program."""
        return self.kept[1]

    @property
    def weights(self) -> dict[str, int]:
        """How many each of those in the program stands for."""
        return {path: len(self.paths) - len(self.kept) + 1 if path == self.typical else 1 for path in self.kept}


@dataclass(frozen=True)
class RepeatedProgram:
    """A program in which some sub-modules stand for others too.

    Attributes:
        program: of what was captured.
        repeats: sets of equal sub-modules of which not all are in the program. Those inside of others are sets of their
            own, one for each of the others that is in the program.
    """

    program: Program
    repeats: tuple[Repeat, ...]

    @cached_property
    def _weights(self) -> dict[str, int]:
        return {path: weight for repeat in self.repeats for path, weight in repeat.weights.items()}

    def weight(self, module: str) -> int:
        """Return how many sub-modules one stands for, given its path: those inside of blocks as often as these."""
        parts, weight = module.split("."), 1
        for end in range(1, len(parts) + 1):
            weight *= self._weights.get(".".join(parts[:end]), 1)
        return weight

    def total(self, amount: Callable[[Node], float]) -> float:
        """Return the sum of an amount over all calls, those that were not captured included."""
        return sum(self.weight(module) * amount(node) for node, module in modules(self.program.graph).items())


def modules(graph: Graph) -> dict[Node, str]:
    """Return the path of the module that each node belongs to; of its own, the user's module itself has ''.

    Sums of gradients belong to the module whose gradient comes last: that of the first reader.
    """
    found: dict[Node, str] = {}
    position: dict[Node, int] = {}
    for node in graph.nodes:
        position[node] = len(position)
        found[node] = node.meta.get("module") or ""
        is_sum = node.meta.get("backward") and node.meta.get("sequence") is None
        if is_sum and not found[node] and node.all_input_nodes:
            found[node] = found[max(node.all_input_nodes, key=position.__getitem__)]
    return found


def capture_repeated(
    module: nn.Module,
    batch: Batch,
    *,
    autocast: torch.dtype | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> RepeatedProgram:
    """Capture a training step as `capture` does, equal blocks once.

    Blocks are equal where they look alike and a rehearsal sees them make the same calls: a module that does something
    else where its number is even is no repeat of its neighbour.

    Args:
        module: see `capture`.
        batch: see `capture`.
        autocast: see `capture`.
        tell: is told what is being done, in a few words.

    Raises:
        CaptureError: see `capture`.
    """
    found = siblings(module)
    repeated: list[Equals] = []
    if found:
        tell("looking for equal blocks")
        try:
            repeated = equals(module, batch, found, autocast)
        except CaptureError:  # capture says what is wrong, if anything is
            tell("blocks could not be rehearsed: all of them are captured")
    parts = dict(module.named_modules())
    aside = {parts[path]: equal.passing for equal in repeated for path in equal.paths if path not in equal.kept}
    tell(f"capturing a training step{f' without {len(aside)} equal blocks' if aside else ''}")
    with standing_aside(aside) if aside else contextlib.nullcontext():
        program = capture(module, batch, autocast=autocast)
    return RepeatedProgram(program, tuple(Repeat(equal.paths, equal.kept) for equal in repeated))
