"""The collectives of a lowered graph, as those are asked for them who know how long they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from paceline.runtime import collectives
from paceline.runtime.traffic import is_halo
from paceline.runtime.windows import sent_bytes

SEND = "send"
_SUFFIXES = ("_in_place", "_max")


@dataclass(frozen=True)
class Started:
    """A collective that a node of a lowered graph starts.

    Attributes:
        kind: as `times.CollectiveTimes` takes it.
        axis: of the mesh.
        whole_bytes: of the whole tensor, as `times.CollectiveTimes` takes it.
        handed_bytes: of the tensor that a rank hands over, as `paceline plan` tells it.
    """

    kind: str
    axis: str
    whole_bytes: int
    handed_bytes: int

    @property
    def name(self) -> str:
        """What a trace calls it: `all_reduce dp`."""
        return f"{self.kind} {self.axis}"


def starts(node: Node) -> bool:
    """Whether a node starts a collective."""
    return node.op == "call_function" and node.target in collectives.STARTS


def waits(node: Node) -> bool:
    """Whether a node waits for one."""
    return node.target is collectives.wait


def started_by(node: Node) -> Started:
    """Return the collective that a node starts."""
    arguments: tuple[Any, ...] = node.args
    axis, parts = str(arguments[-2]), int(arguments[-1])
    if is_halo(node):
        nbytes = sent_bytes(node)
        return Started(SEND, axis, nbytes, nbytes)
    kind = _kind(node)
    handed = int(arguments[0].meta["val"].nbytes)
    whole = handed * parts if kind in ("all_gather", "all_to_all") else handed
    return Started(kind, axis, whole, handed)


def _kind(node: Node) -> str:
    name = str(getattr(node.target, "__name__", node.target))
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def operator_name(node: Node) -> str:
    """Return the name of the operator that a node calls: `addmm`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).partition("::")[2]
    return str(getattr(target, "__name__", target))
