"""The captured program as a dictionary: what each of its tensors is to the user."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from paceline.placement.calls import resolve, results
from paceline.placement.origins import Origin
from paceline.planner.explanation import What
from paceline.program.program import Input, InputRole, Program
from paceline.runtime.passes.views import is_view

aten = torch.ops.aten

_MAIN = {
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "embedding"),
    *("native_layer_norm", "native_group_norm", "_fused_rms_norm", "batch_norm_apply", "native_batch_norm"),
    *("nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
}
_MAIN_LIKE = ("attention", "softmax", "batch_norm_legit", "_loss")
_COPIES = {aten._to_copy.default, aten.clone.default}
_ROLES = {
    InputRole.PARAMETER: What.PARAMETER,
    InputRole.BUFFER: What.BUFFER,
    InputRole.BATCH: What.BATCH,
    InputRole.TANGENT: What.LOSS,
}


def operator_name(node: Node) -> str:
    """Return the name of the operator that a node calls, `addmm`."""
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else _plain(target)


def _plain(target: object) -> str:
    return str(getattr(target, "__name__", target))


def what_is(item: Input) -> What:
    """Return what an input is to the user."""
    return _ROLES[item.role]


class Captured:
    """Looks up tensors of a captured program by their origin."""

    def __init__(self, program: Program) -> None:
        self._nodes: dict[str, Node] = {node.name: node for node in program.graph.nodes}
        self._inputs: dict[Node, Input] = dict(zip(program.placeholders, program.inputs, strict=True))

    def node(self, origin: Origin) -> Node | None:
        """Return the node that makes a tensor; None where nothing of the captured program corresponds to it."""
        return self._nodes.get(origin.node)

    def value(self, origin: Origin) -> Tensor | None:
        """Return the whole tensor, a fake one."""
        node = self.node(origin)
        return None if node is None else results(node)[origin.index]

    def input(self, node: Node) -> Input | None:
        """Return the input that a tensor is, perhaps seen another way or cast."""
        return self._inputs.get(self.root(node))

    def root(self, node: Node) -> Node:
        """Return the node that a chain of views, casts and copies starts from."""
        while node.op == "call_function" and node.all_input_nodes and (_is_view(node) or node.target in _COPIES):
            node = node.all_input_nodes[0]
        return node

    def what(self, node: Node) -> tuple[What, str, str]:
        """Return what a tensor is, the name of the parameter or module, and the operator that made it.

        No operator makes a parameter, but one may transpose or cast it.
        """
        item = self.input(node)
        if item is not None:
            return what_is(item), item.name, operator_name(node) if node.op == "call_function" else ""
        root = self.root(node)
        kind = What.ACTIVATION_GRADIENT if root.meta.get("backward") else What.ACTIVATION
        return kind, root.meta.get("module", ""), operator_name(root)

    def is_main(self, origin: Origin) -> bool:
        """Whether a tensor is a main result of the forward pass: see `Activation`."""
        node = self.node(origin)
        if node is None or node.op != "call_function" or origin.index or node.meta.get("backward"):
            return False
        name = operator_name(node)
        return name in _MAIN or any(part in name for part in _MAIN_LIKE)

    def as_returned(self, origin: Origin) -> Origin:
        """Follow a result through views to what its module returns: [batch x time, width] becomes [batch, time, width].

        The placements of the tensor found are not known here.
        """
        node = self.node(origin)
        assert node is not None
        if _is_tuple(node):
            items = [user for user in node.users if user.args[1] == origin.index]
            if not items:
                return origin
            node = items[0]
        while (view := _only_view(node)) is not None:
            node = view
        ref = resolve(node)
        return Origin(ref.node.name, ref.index)


def _only_view(node: Node) -> Node | None:
    """Return the view by the same module that alone reads a tensor in the forward pass."""
    readers = [user for user in node.users if not user.meta.get("backward")]
    if len(readers) != 1 or readers[0].op != "call_function" or _is_tuple(readers[0]):
        return None
    (reader,) = readers
    same = reader.meta["module"] == node.meta["module"] and reader.meta["val"].numel() == node.meta["val"].numel()
    return reader if same and _is_view(reader) else None


def _is_view(node: Node) -> bool:
    return is_view(node) or node.target is aten._unsafe_view.default


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))
