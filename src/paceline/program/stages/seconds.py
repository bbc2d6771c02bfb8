"""How long calls take, roughly: what stages are balanced by where nobody knows better."""

from __future__ import annotations

from torch.fx import Node

from paceline.program.stages.kinds import bytes_of, is_call, is_cheap, is_communication, tensors
from paceline.program.work import work_of

_PER_CALL = 5e-6
_FLOPS_PER_SECOND = 30e9
_BYTES_PER_SECOND = 8e9
_PER_MESSAGE = 30e-6
_BYTES_SENT_PER_SECOND = 1e9
_FLOAT_BYTES = 4


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
    return work_of(node).flops


def is_heavy(node: Node) -> bool:
    """Whether a call makes many operations with each element; an outer product makes few."""
    elements = sum(
        value.numel() for source in (node, *node.all_input_nodes) for value in tensors(source.meta.get("val"))
    )
    return flops_of(node) > 4 * elements
