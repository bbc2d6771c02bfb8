"""How long calls take, roughly: what stages are balanced by where nobody knows better."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from paceline.program import attention  # noqa: F401  (registers operators)
from paceline.program.stages.kinds import bytes_of, is_call, is_cheap, is_communication, tensors

aten = torch.ops.aten
ours = torch.ops.paceline
_PER_CALL = 5e-6
_FLOPS_PER_SECOND = 30e9
_BYTES_PER_SECOND = 8e9
_PER_MESSAGE = 30e-6
_BYTES_SENT_PER_SECOND = 1e9
_FLOAT_BYTES = 4
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (4.0, 0),
    ours.causal_rows.default: (4.0, 0),
    ours.ring_rows.default: (4.0, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (10.0, 1),
    ours.causal_rows_backward.default: (10.0, 1),
    ours.ring_rows_backward.default: (10.0, 1),
}
"""Operations for each query, key and element of a head; and which argument the queries are."""


def seconds_of(node: Node) -> float:
    """Return about how long a call takes on one core of a CPU."""
    if not is_call(node) or is_cheap(node):
        return 0.0
    if is_communication(node):
        return message_seconds(bytes_of(node))
    touched = bytes_of(node) + sum(map(bytes_of, node.all_input_nodes))
    wide = max((value.element_size() for value in tensors(node.meta.get("val"))), default=_FLOAT_BYTES)
    rate = _FLOPS_PER_SECOND * _FLOAT_BYTES / max(wide, _FLOAT_BYTES)
    return _PER_CALL + flops_of(node) / rate + touched / _BYTES_PER_SECOND


def message_seconds(nbytes: float) -> float:
    """Return about how long a message takes."""
    return _PER_MESSAGE + nbytes / _BYTES_SENT_PER_SECOND


def flops_of(node: Node) -> float:
    """Return the floating-point operations of a product of matrices, a convolution or an attention; 0 for others."""
    target: Any = node.target
    if target in _ATTENTION:
        factor, first = _ATTENTION[target]
        queries, keys = (tuple(_value(node.args[first + i]).shape) for i in range(2))
        return factor * prod(queries) * keys[2]
    count = flop_registry.get(getattr(target, "overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return float(count(*args, **kwargs, out_val=node.meta["val"]))


def is_heavy(node: Node) -> bool:
    """Whether a call makes many operations with each element; an outer product makes few."""
    elements = sum(
        value.numel() for source in (node, *node.all_input_nodes) for value in tensors(source.meta.get("val"))
    )
    return flops_of(node) > 4 * elements


def _value(argument: Any) -> Tensor:
    value: Tensor = argument.meta["val"]
    return value
