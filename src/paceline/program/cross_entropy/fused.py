"""Cross-entropy in few passes over the logits.

Neither the logarithms are made nor the gradient that is zero at all classes but one, see `program.softmax`. The sum of
that gradient along the classes is known beforehand, so that split classes need no communication in the backward pass.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from paceline.program import softmax  # noqa: F401  (registers the operators)
from paceline.program.cross_entropy.found import Calls, CrossEntropy, Targets, cross_entropies, targets

aten = torch.ops.aten
ours = torch.ops.paceline
_NONE, _SUM = 0, 2
_LEAST_LOGITS = 1 << 16
"""Below it, more calls cost more than the passes that they save."""


def fuse(graph: Graph) -> None:
    """Rewrite the cross-entropies of many logits on CPUs; GPUs have fused kernels for theirs."""
    for found in cross_entropies(graph):
        logits = found.log_softmax.meta["val"]
        exact = logits.dtype in (torch.float32, torch.float64) and not found.log_softmax.args[2]
        large = logits.is_cpu and logits.numel() >= _LEAST_LOGITS
        if exact and large and all(targets(call).reduction in (_NONE, _SUM) for call in found.calls):
            _rewrite(graph, found)


def _classes(calls: Calls, of: Targets) -> tuple[Node, Node]:
    """Return which targets count, and all targets, with a class in the place of those that do not."""
    valid = calls(aten.ne.Scalar, of.target, of.ignore_index)
    return valid, calls(aten.where.ScalarOther, valid, of.target, 0)


def _weighted(calls: Calls, values: Any, of: Targets, classes: Node) -> Any:
    if of.weight is None:
        return values
    return calls(aten.mul.Tensor, values, calls(aten.index.Tensor, of.weight, [classes]))


def _exponentials(calls: Calls, x: Any, maximum: Node, keep: bool) -> tuple[Node | None, Node]:
    """Return exp(x - maximum), which the gradient is made of, and its sum."""
    if not keep:
        return None, calls(ours.exponential_sums.default, x, maximum, 1)
    both = calls(ours.exponentials.default, x, maximum, 1)
    return calls(operator.getitem, both, 0), calls(operator.getitem, both, 1)


def _rewrite(graph: Graph, found: CrossEntropy) -> None:
    calls, x = Calls(graph, found.log_softmax), found.log_softmax.args[0]
    maximum = calls(aten.amax.default, x, [1], True)
    exponentials, total = _exponentials(calls, x, maximum, bool(found.gradients))
    for call in found.losses:
        of, calls = targets(call), Calls(graph, call)
        valid, classes = _classes(calls, of)
        at = calls(aten.gather.default, x, 1, calls(aten.unsqueeze.default, classes, 1))
        below = calls(aten.add.Tensor, calls(aten.sub.Tensor, maximum, at), calls(aten.log.default, total))
        terms = _weighted(calls, calls(aten.squeeze.dim, below, 1), of, classes)
        result = calls(aten.where.ScalarOther, valid, terms, 0.0)
        if of.reduction == _SUM:
            result = calls(aten.sum.default, result)
        for user in [user for user in call.users if user.args[1] == 0]:
            user.replace_all_uses_with(result)
    for call, reader in found.gradients:
        of, calls = targets(call), Calls(graph, call)
        valid, classes = _classes(calls, of)
        scale = calls(aten.where.ScalarOther, valid, _weighted(calls, call.args[0], of, classes), 0.0)
        factor = calls(aten.div.Tensor, scale, calls(aten.squeeze.dim, total, 1))
        reader.replace_all_uses_with(calls(ours.cross_entropy_grad.default, exponentials, factor, classes, scale))
