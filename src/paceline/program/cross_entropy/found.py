"""Cross-entropies in a captured graph, and the words to rewrite them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from paceline.program.fake import evaluate, mode_of

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
_THROUGH = aten._log_softmax_backward_data.default


@dataclass(frozen=True)
class Targets:
    """What a loss or its gradient says of its targets [N]."""

    target: Node
    weight: Node | None
    reduction: int
    ignore_index: int


@dataclass(frozen=True)
class CrossEntropy:
    """A log-softmax of logits [N, C] that is read at targets only.

    Attributes:
        log_softmax: reads the logits.
        losses: calls of `nll_loss_forward`, of which nothing is used but the loss.
        gradients: calls of `nll_loss_backward`, each with the call that takes it through the log-softmax, its only
            reader.
    """

    log_softmax: Node
    losses: tuple[Node, ...]
    gradients: tuple[tuple[Node, Node], ...]

    @property
    def calls(self) -> tuple[Node, ...]:
        """All calls that read targets."""
        return (*self.losses, *(gradient for gradient, _ in self.gradients))


def cross_entropies(graph: Graph) -> list[CrossEntropy]:
    """Return the cross-entropies of a graph."""
    found = [_read(node) for node in graph.nodes if node.target is aten._log_softmax.default]
    return [item for item in found if item is not None]


def targets(call: Node) -> Targets:
    """Return what a call of a loss, or of its gradient, says of its targets."""
    first = first_target_argument(call)
    arguments: tuple[Any, ...] = call.args[first : first + 4]
    return Targets(*arguments)


def first_target_argument(call: Node) -> int:
    """Return the position of the targets among the arguments; class weights, reduction and ignored index follow."""
    return 1 if call.target is _FORWARD else 2


def _read(log_softmax: Node) -> CrossEntropy | None:
    users = list(log_softmax.users)
    losses = tuple(user for user in users if user.target is _FORWARD and user.args[0] is log_softmax)
    sources = [user for user in users if user.target is _BACKWARD and len(user.users) == 1]
    gradients = tuple((source, next(iter(source.users))) for source in sources)
    readers = [reader for source, reader in gradients if reader.target is _THROUGH and reader.args[0] is source]
    known = {*losses, *sources, *readers}
    weights = [user for loss in losses for user in loss.users if user.args[1] == 1]
    if log_softmax.meta["val"].ndim != 2 or log_softmax.args[1] not in (1, -1) or len(readers) != len(sources):
        return None
    if any(user not in known for user in users) or any(
        user not in sources for weight in weights for user in weight.users
    ):
        return None
    return CrossEntropy(log_softmax, losses, gradients)


class Calls:
    """Writes calls before a node and as part of what it is part of."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph = graph
        self._before = before
        self._fake = mode_of(graph)

    def __call__(self, target: Callable[..., Any], *args: Any) -> Node:
        """Write a call."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args)
        node.meta = {**self._before.meta, "val": evaluate(node, self._fake)}
        return node

    def value(self, node: Node) -> Any:
        """Return what a call gives, whose arguments have changed."""
        return evaluate(node, self._fake)
