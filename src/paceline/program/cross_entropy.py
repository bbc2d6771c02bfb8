"""Cross-entropy in few passes: a rewrite of captured graphs in which a log-softmax is read at the targets only.

Neither the logarithms are made nor the gradient that is zero at all classes but one, see `program.softmax`. The sum of
that gradient along the classes is known beforehand, so that split classes need no communication in the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from paceline.program import softmax  # noqa: F401  (registers the operators)
from paceline.program.fake import evaluate, mode_of

aten = torch.ops.aten
ours = torch.ops.paceline
_NONE, _SUM = 0, 2
_LEAST_LOGITS = 1 << 16
"""Below it, more calls cost more than the passes that they save."""


def fuse_cross_entropy(graph: Graph) -> None:
    """Rewrite the cross-entropies of logits [N, C] on CPUs; GPUs have fused kernels for theirs."""
    losses = [_loss_of(node) for node in graph.nodes if node.target is aten._log_softmax.default]
    for loss in losses:
        if loss is not None:
            _rewrite(graph, loss)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


@dataclass(frozen=True)
class _Targets:
    """What a loss or its gradient says of its targets."""

    target: Node
    weight: Node | None
    reduction: int
    ignore_index: int

    @property
    def is_known(self) -> bool:
        return self.reduction in (_NONE, _SUM) and self.target.meta["val"].ndim == 1


@dataclass(frozen=True)
class _Loss:
    """The calls of a cross-entropy: the losses, and the gradients of losses with the calls that alone read them."""

    log_softmax: Node
    losses: list[Node]
    gradients: list[tuple[Node, Node]]


def _loss_of(log_softmax: Node) -> _Loss | None:
    value, (_, dim, to_float) = log_softmax.meta["val"], log_softmax.args
    exact = value.dtype in (torch.float32, torch.float64) and not to_float
    if value.ndim != 2 or dim not in (1, -1) or not exact or not value.is_cpu or value.numel() < _LEAST_LOGITS:
        return None
    losses, gradients = [], []
    for user in log_softmax.users:
        if user.target is aten.nll_loss_forward.default and user.args[0] is log_softmax:
            losses.append(user)
        elif user.target is aten.nll_loss_backward.default and len(user.users) == 1:
            gradients.append((user, next(iter(user.users))))
        elif user.target is not aten._log_softmax_backward_data.default:
            return None
    readers = {reader for _, reader in gradients}
    known = all(_targets(call).is_known for call in (*losses, *(gradient for gradient, _ in gradients)))
    paired = all(
        user in readers for user in log_softmax.users if user.target is aten._log_softmax_backward_data.default
    )
    return _Loss(log_softmax, losses, gradients) if known and paired and _are_read_here(losses, gradients) else None


def _are_read_here(losses: list[Node], gradients: list[tuple[Node, Node]]) -> bool:
    """Whether gradients go through the log-softmax, and weights of losses are read by gradients only."""
    through = all(
        reader.target is aten._log_softmax_backward_data.default and reader.args[0] is gradient
        for gradient, reader in gradients
    )
    weights = [user for loss in losses for user in loss.users if user.args[1] == 1]
    sources = [gradient for gradient, _ in gradients]
    return through and all(reader in sources for weight in weights for reader in weight.users)


def _targets(call: Node) -> _Targets:
    first = 1 if call.target is aten.nll_loss_forward.default else 2
    arguments: tuple[Any, ...] = call.args[first : first + 4]
    return _Targets(*arguments)


class _Calls:
    """Writes calls before a node and as part of what it is part of."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph = graph
        self._before = before
        self._fake = mode_of(graph)

    def __call__(self, target: Callable[..., Any], *args: Any) -> Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args)
        node.meta = {**self._before.meta, "val": evaluate(node, self._fake)}
        return node

    def classes(self, of: _Targets) -> tuple[Node, Node]:
        """Which targets count, and all targets, with a class in the place of those that do not."""
        valid = self(aten.ne.Scalar, of.target, of.ignore_index)
        return valid, self(aten.where.ScalarOther, valid, of.target, 0)

    def weighted(self, values: Node, of: _Targets, classes: Node) -> Node:
        if of.weight is None:
            return values
        return self(aten.mul.Tensor, values, self(aten.index.Tensor, of.weight, [classes]))


def _exponentials(calls: _Calls, x: Any, maximum: Node, keep: bool) -> tuple[Node | None, Node]:
    """Return exp(x - maximum), which the gradient is made of, and its sum."""
    if not keep:
        return None, calls(ours.exponential_sums.default, x, maximum, 1)
    both = calls(ours.exponentials.default, x, maximum, 1)
    return calls(operator.getitem, both, 0), calls(operator.getitem, both, 1)


def _rewrite(graph: Graph, loss: _Loss) -> None:
    calls = _Calls(graph, loss.log_softmax)
    x = loss.log_softmax.args[0]
    maximum = calls(aten.amax.default, x, [1], True)
    exponentials, total = _exponentials(calls, x, maximum, bool(loss.gradients))
    for call in loss.losses:
        of, calls = _targets(call), _Calls(graph, call)
        valid, classes = calls.classes(of)
        at = calls(aten.gather.default, x, 1, calls(aten.unsqueeze.default, classes, 1))
        below = calls(aten.add.Tensor, calls(aten.sub.Tensor, maximum, at), calls(aten.log.default, total))
        terms = calls.weighted(calls(aten.squeeze.dim, below, 1), of, classes)
        result = calls(aten.where.ScalarOther, valid, terms, 0.0)
        if of.reduction == _SUM:
            result = calls(aten.sum.default, result)
        for user in [user for user in call.users if user.args[1] == 0]:
            user.replace_all_uses_with(result)
    for call, reader in loss.gradients:
        of, calls = _targets(call), _Calls(graph, call)
        valid, classes = calls.classes(of)
        grad: Any = call.args[0]
        scale = calls(aten.where.ScalarOther, valid, calls.weighted(grad, of, classes), 0.0)
        factor = calls(aten.div.Tensor, scale, calls(aten.squeeze.dim, total, 1))
        reader.replace_all_uses_with(calls(ours.cross_entropy_grad.default, exponentials, factor, classes, scale))
