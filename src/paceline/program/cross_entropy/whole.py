"""Losses of cut sequences, `cross_entropy(logits[:, :-1], labels[:, 1:])`, are taken over whole ones.

Instead of the logits the targets are lengthened, by ignored ones. So the logits are not copied, nor is their gradient
put together with zeros; and a sequence of even length, which splits, does not become one of odd length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from paceline.program.cross_entropy.found import (
    Calls,
    CrossEntropy,
    cross_entropies,
    first_target_argument,
    targets,
)

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SUM = 2
_MOST_CUT = 4
"""Of so many rows at most one is cut: more would be worth cutting."""


def take_whole_sequences(graph: Graph) -> None:
    """Rewrite the cross-entropies that are sums over cut sequences of logits."""
    for found in cross_entropies(graph):
        cut = _cut(found)
        if cut is not None and all(targets(call).reduction == _SUM for call in found.calls):
            _rewrite(graph, found, cut)


@dataclass(frozen=True)
class _Cut:
    """Where the logits of a cross-entropy come from.

    Attributes:
        whole: logits [B, T, C].
        start, end: what is kept of T.
        gradients: for each gradient, the call that lengthens it to [B, T, C].
    """

    whole: Node
    start: int
    end: int
    gradients: tuple[Node, ...]


def _cut(found: CrossEntropy) -> _Cut | None:
    rows = _source(found.log_softmax.args[0], _VIEWS)
    part = _source(rows, (aten.clone.default,)) or rows
    if part is None or part.target is not aten.slice.Tensor:
        return None
    whole, dim, start, end, step = (*part.args, 1)[:5]
    assert isinstance(whole, Node)
    shape = tuple(whole.meta["val"].shape)
    if len(shape) != 3 or dim != 1 or step != 1 or tuple(part.meta["val"].shape)[::2] != shape[::2]:
        return None
    first, last, _ = slice(start, end).indices(shape[1])
    lengthened = [_lengthened(reader, shape, (first, last)) for _, reader in found.gradients]
    gradients = tuple(node for node in lengthened if node is not None)
    if (last - first) * _MOST_CUT < shape[1] * (_MOST_CUT - 1) or len(gradients) != len(lengthened):
        return None
    return _Cut(whole, first, last, gradients)


def _source(node: Any, through: tuple[Any, ...]) -> Node | None:
    """Return what a call of one of these operators reads; None where the node is no such call."""
    if not isinstance(node, Node) or node.target not in through:
        return None
    source = node.args[0]
    return source if isinstance(source, Node) else None


def _lengthened(gradient: Node, shape: tuple[int, ...], kept: tuple[int, int]) -> Node | None:
    """Return the only reader of a view of a gradient, where it puts it into zeros of `shape` at the rows `kept`."""
    view = next(iter(gradient.users)) if len(gradient.users) == 1 else gradient
    reader = next(iter(view.users)) if len(view.users) == 1 else view
    if view.target not in _VIEWS or reader.target is not aten.slice_backward.default:
        return None
    arguments: tuple[Any, ...] = reader.args
    _, sizes, dim, start, end, step = arguments
    same = slice(start, end).indices(shape[1])[:2] == kept and view.meta["val"].ndim == 3
    return reader if same and list(sizes) == list(shape) and (dim, step) == (1, 1) else None


def _rewrite(graph: Graph, found: CrossEntropy, cut: _Cut) -> None:
    batch, time, classes = cut.whole.meta["val"].shape
    rows = Calls(graph, found.log_softmax)(aten.reshape.default, cut.whole, [batch * time, classes])
    found.log_softmax.update_arg(0, rows)
    again = [found.log_softmax]
    for call in found.calls:
        of, calls = targets(call), Calls(graph, call)
        kept = calls(aten.view.default, of.target, [batch, cut.end - cut.start])
        padded = calls(aten.constant_pad_nd.default, kept, [cut.start, time - cut.end], of.ignore_index)
        call.update_arg(first_target_argument(call), calls(aten.view.default, padded, [batch * time]))
        again.append(call)
    again += [reader for _, reader in found.gradients]
    for node in again:
        node.meta["val"] = Calls(graph, node).value(node)
    for (_, reader), lengthened in zip(found.gradients, cut.gradients, strict=True):
        whole = Calls(graph, lengthened)(aten.view.default, reader, [batch, time, classes])
        lengthened.replace_all_uses_with(whole)
