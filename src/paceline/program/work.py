"""What a call computes: the one place that counts floating-point operations, and bytes that are read and written.

Products are counted as 2 M N K, attention as if every query saw every key (`CallWork.causal` says where a kernel leaves
half of that out), its backward pass with the scores computed again. Gathering reads what it takes and not the table
that it takes from; views are free. An operator on matrices that is not known here is never free: it is counted as
PyTorch's own table does, or else guessed, and `CallWork.guessed` is true.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from paceline.program import attention  # noqa: F401  (registers operators)
from paceline.program.tensor_meta import TensorMeta
from paceline.program.views import is_view

aten = torch.ops.aten
ours = torch.ops.paceline
Shape = tuple[int, ...]
Value = Tensor | TensorMeta


class CallKind(Enum):
    """What limits a call."""

    PRODUCT = "product"
    """Products of matrices, and convolutions."""
    ATTENTION = "attention"
    """Softmax of products, multiplied by values, in one kernel."""
    TOUCH = "touch"
    """Elementwise work, sums, copies: it takes as long as its bytes."""
    VIEW = "view"
    """Nothing: another view of memory, one of several results, or an exchange between ranks, which is no call."""


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of a call: `factor` times `times` times all of `dims`.

    Attributes:
        kind: `PRODUCT` or `ATTENTION`.
        dims: of each product, rows, columns and the inner dimension; of each head of attention, queries, keys and the
            size of the head.
        times: how many such products or heads there are.
        factor: operations for each of them.
        causal: queries see the keys before them alone.
        guessed: nobody knows what the operator computes.
    """

    kind: CallKind
    dims: tuple[int, int, int]
    times: int = 1
    factor: float = 2.0
    causal: bool = False
    guessed: bool = False

    @property
    def flops(self) -> float:
        """How many they are."""
        return self.factor * self.times * prod(self.dims)


@dataclass(frozen=True)
class CallWork:
    """What a call computes, reads and writes.

    Attributes:
        kind: what limits it.
        operations: of a product or attention.
        read_bytes, written_bytes: of memory; of a gather, what it takes and not what it takes it from.
    """

    kind: CallKind
    read_bytes: int = 0
    written_bytes: int = 0
    operations: Operations | None = None

    @property
    def flops(self) -> float:
        """Floating-point operations of products; 0 of a call that has none."""
        return 0.0 if self.operations is None else self.operations.flops

    @property
    def dims(self) -> tuple[int, ...]:
        """See `Operations`."""
        return () if self.operations is None else self.operations.dims

    @property
    def times(self) -> int:
        """See `Operations`."""
        return 1 if self.operations is None else self.operations.times

    @property
    def view(self) -> bool:
        """Whether nothing is computed."""
        return self.kind is CallKind.VIEW

    @property
    def guessed(self) -> bool:
        """Whether nobody knows what the operator computes: it is taken for products with square matrices."""
        return self.operations is not None and self.operations.guessed


def work_of(node: Node) -> CallWork:
    """Return what a call computes. Nodes that are no calls, and exchanges between ranks, compute nothing."""
    target = node.target
    if node.op != "call_function" or _is_free(node):
        return CallWork(CallKind.VIEW)
    inputs, written = _inputs(node), sum(nbytes for _, nbytes in writes(node))
    read = sum(nbytes for _, nbytes in reads(node))
    found = None
    if target in _COUNTS:
        results = [
            tuple(value.shape) if isinstance(value, (Tensor, TensorMeta)) else None
            for value in _items(node.meta.get("val"))
        ]
        found = operations(Shapes(target, [tuple(tensor.shape) for tensor in inputs], results, _arguments(node)))
    if found is None:
        found = _of_torch(node) or _guess(target, inputs)
    return CallWork(CallKind.TOUCH if found is None else found.kind, read, written, found)


@dataclass(frozen=True)
class Shapes:
    """A call as far as its operations go.

    Attributes:
        target: the operator.
        inputs: shape of each tensor argument, in the order of the schema.
        outputs: shape of each result; None where there is none.
        arguments: the others by the names of the schema, defaults included.
    """

    target: Any
    inputs: Sequence[Shape]
    outputs: Sequence[Shape | None]
    arguments: Mapping[str, Any]


_Count = Callable[[Shapes], Operations]


def reads(node: Node) -> list[tuple[Value, int]]:
    """Return the tensors that a call reads, in the order of its schema, and how many bytes of each."""
    found = [(tensor, _bytes(tensor)) for tensor in _inputs(node)]
    if node.target in _GATHERS and found:
        found[0] = found[0][0], sum(nbytes for _, nbytes in writes(node))
    return found


def writes(node: Node) -> list[tuple[Value, int]]:
    """Return the tensors that a call writes, in order, and how many bytes of each."""
    return [(tensor, _bytes(tensor)) for tensor in _tensors(node.meta.get("val"))]


def operations(call: Shapes) -> Operations | None:
    """Return the operations of a call of a known product, from shapes alone; None for every other operator."""
    count = _COUNTS.get(call.target)
    found = None if count is None else count(call)
    causal = call.target in _CAUSAL or call.arguments.get("is_causal") is True
    return replace(found, causal=True) if found is not None and causal else found


def guesses(graphs: Iterable[Graph]) -> list[str]:
    """Return the operators whose operations are guessed, by name."""
    return sorted({str(node.target) for graph in graphs for node in graph.nodes if work_of(node).guessed})


def _product(rows: int, columns: int, inner: int, times: int = 1) -> Operations:
    return Operations(CallKind.PRODUCT, (rows, columns, inner), times)


def _matrices(first: int) -> _Count:
    """Products of matrices [.., M, K] and [.., K, N], the arguments numbered from `first`."""

    def count(call: Shapes) -> Operations:
        left, right = call.inputs[first], call.inputs[first + 1]
        return _product(left[-2], right[-1], left[-1], prod(left[:-2]))

    return count


def _matrix_vector(first: int) -> _Count:
    return lambda call: _product(call.inputs[first][0], 1, call.inputs[first][1])


def _dot(call: Shapes) -> Operations:
    return _product(1, 1, call.inputs[0][0])


def _grouped(call: Shapes) -> Operations:
    """Each row of the first matrix meets one of several; where both are flat, sums run over the rows of a group."""
    left, right = call.inputs[0], call.inputs[1]
    if len(left) == len(right) == 2:
        return _product(left[0], right[1], left[1])
    return _product(left[-2], right[-1], left[-1], prod(left[:-2]) if len(left) == 3 else 1)


def _convolution(call: Shapes) -> Operations:
    return _convolved(call.outputs[0] or (), call.inputs[0], call.inputs[1], call.arguments)


def _convolution_backward(call: Shapes) -> Operations:
    """As many operations as the forward pass, for the gradient of the input and again for that of the weight."""
    forward = _convolved(call.inputs[0], call.inputs[1], call.inputs[2], call.arguments)
    return replace(forward, times=forward.times * sum(result is not None for result in call.outputs[:2]))


def _convolved(result: Shape, source: Shape, weight: Shape, arguments: Mapping[str, Any]) -> Operations:
    """Each place of the result is made of a patch of the source; transposed, it is the other way round.

    A weight is [out, in / groups, ..], or, transposed, [in, out / groups, ..].
    """
    places = source if arguments["transposed"] else result
    groups: int = arguments["groups"]
    return _product(places[0] * prod(places[2:]), weight[0] // groups, prod(weight[1:]), groups)


def _attention(first: int, factor: float) -> _Count:
    """Attention on [B, H, T, D]; `factor` is for heads of which queries and values are equally wide."""

    def count(call: Shapes) -> Operations:
        query, key, value = call.inputs[first : first + 3]
        wide = factor * (query[3] + value[3]) / (2 * query[3])
        return Operations(CallKind.ATTENTION, (query[2], key[2], query[3]), prod(query[:2]), wide)

    return count


def _attention_by_time(first: int, factor: float) -> _Count:
    """Attention on [B, T, H, D]."""

    def count(call: Shapes) -> Operations:
        (batch, queries, heads, size), key = call.inputs[first], call.inputs[first + 1]
        return Operations(CallKind.ATTENTION, (queries, key[1], size), batch * heads, factor)

    return count


def _pairs(first: int, factor: float) -> _Count:
    """Attention whose keys and values are side by side in one tensor, [B, G, T, 2 D]."""

    def count(call: Shapes) -> Operations:
        query, pair = call.inputs[first], call.inputs[first + 1]
        return Operations(CallKind.ATTENTION, (query[2], pair[2], query[3]), prod(query[:2]), factor)

    return count


_COUNTS: Mapping[Any, _Count] = {
    aten.mm.default: _matrices(0),
    aten.bmm.default: _matrices(0),
    aten.addmm.default: _matrices(1),
    aten.baddbmm.default: _matrices(1),
    aten._addmm_activation.default: _matrices(1),
    aten.mv.default: _matrix_vector(0),
    aten.addmv.default: _matrix_vector(1),
    aten.dot.default: _dot,
    aten.vdot.default: _dot,
    aten._int_mm.default: _matrices(0),
    aten._scaled_mm.default: _matrices(0),
    aten._grouped_mm.default: _grouped,
    aten.convolution.default: _convolution,
    aten._convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(0, 4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(1, 10),
    aten._scaled_dot_product_flash_attention.default: _attention(0, 4),
    aten._scaled_dot_product_flash_attention_backward.default: _attention(1, 10),
    aten._scaled_dot_product_efficient_attention.default: _attention(0, 4),
    aten._scaled_dot_product_efficient_attention_backward.default: _attention(1, 10),
    aten._scaled_dot_product_cudnn_attention.default: _attention(0, 4),
    aten._scaled_dot_product_cudnn_attention_backward.default: _attention(1, 10),
    aten._scaled_dot_product_fused_attention_overrideable.default: _attention(0, 4),
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: _attention(1, 10),
    aten._flash_attention_forward.default: _attention_by_time(0, 4),
    aten._flash_attention_backward.default: _attention_by_time(1, 10),
    aten._efficient_attention_forward.default: _attention_by_time(0, 4),
    aten._efficient_attention_backward.default: _attention_by_time(1, 10),
    ours.causal_rows.default: _attention(0, 4),
    ours.causal_rows_backward.default: _attention(1, 10),
    ours.ring_rows.default: _pairs(0, 4),
    ours.ring_rows_backward.default: _pairs(1, 10),
}

_CAUSAL = {ours.causal_rows.default, ours.causal_rows_backward.default}

_GATHERS = {
    aten.embedding.default,
    aten.gather.default,
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_select.default,
    aten.take.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
}
"""Operators that read, of their first argument, as many elements as they return."""

_FREE = {aten._unsafe_view.default, aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}

_HEAVY = re.compile(
    "linalg|cholesky|svd|qr|geqrf|orgqr|ormqr|eigh?|lu|inverse|triangular|householder|lstsq|cdist|trilinear|bilinear"
    "|attention|rnn|lstm|gru|fft|linear|matmul|conv[a-z0-9]*|[a-z]*mm"
)
"""What a word of the name of an operator may be that makes more than a few operations with each element."""
_LIGHT = {aten.linalg_vector_norm.default, aten.linalg_cross.default, aten.linalg_vecdot.default}


def _of_torch(node: Node) -> Operations | None:
    """Return what PyTorch's own table counts, as if it were one product of one row."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return _product(1, 1, int(count(*args, **kwargs, out_val=node.meta["val"])) // 2)


def _guess(target: Any, inputs: Sequence[Value]) -> Operations | None:
    """Return a product with a square matrix for an operator on matrices that nobody knows; None for light ones."""
    matrices = [tensor for tensor in inputs if tensor.ndim >= 2 and tensor.is_floating_point()]
    if not matrices or not _may_be_heavy(target):
        return None
    largest = max(matrices, key=lambda tensor: tensor.numel())
    size = int(largest.shape[-1])
    return replace(_product(largest.numel() // max(size, 1), size, size), guessed=True)


def _may_be_heavy(target: Any) -> bool:
    """Whether an operator may do more than touch each element: by its name, or because it is somebody's own."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    if target.namespace not in ("aten", "prims"):
        return target.namespace != "paceline"
    if target in _LIGHT or torch.Tag.pointwise in target.tags:
        return False
    words = target._schema.name.partition("::")[2].split("_")
    return words[0] != "upsample" and any(_HEAVY.fullmatch(word) for word in words)


def _is_free(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return is_view(node) or target in _FREE
    # Plain functions stand for exchanges between ranks; operators of higher order compute.
    return target is operator.getitem or not isinstance(target, torch._ops.HigherOrderOperator)


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    named: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        named[argument.name] = (
            node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, default)
        )
    return named


def _inputs(node: Node) -> list[Value]:
    return [tensor for source in _sources(node) for tensor in _tensors(source.meta.get("val"))]


def _sources(node: Node) -> list[Node]:
    """Return the nodes that a call reads, in the order of its arguments, one as often as it is read."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _tensors(value: Any) -> Iterable[Value]:
    return (item for item in _items(value) if isinstance(item, (Tensor, TensorMeta)))


def _bytes(tensor: Value) -> int:
    """Bytes of the elements that lie in memory: one that is expanded lies there once."""
    lying = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)
    return lying * tensor.element_size()


__all__ = ["CallKind", "CallWork", "Operations", "Shapes", "guesses", "operations", "reads", "work_of", "writes"]
