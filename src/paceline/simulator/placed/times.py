"""How long calls and collectives take: what a walk in virtual time asks of whoever knows.

Two answer: `modelled` works it out for a described cluster, and measurements of this machine look it up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch.fx import Node


class OperatorTimes(Protocol):
    """How long a rank takes for a call."""

    def seconds(self, node: Node) -> float:
        """Return the seconds of a call of a placed graph, whose `meta["val"]` are the local tensors; 0 for views.

        Collectives and waits are never asked for; what packs and unpacks their tensors is.
        """
        ...


class CollectiveTimes(Protocol):
    """How long ranks take for what they do together."""

    def seconds(self, kind: str, nbytes: int, axis: str) -> float:
        """Return the seconds from the moment at which all ranks have begun.

        Args:
            kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast` or `send`.
            nbytes: of the whole tensor: what is summed, what is gathered, what is scattered; of an `all_to_all` what
                all ranks give together; of a `send` the message.
            axis: of the mesh, over whose ranks it goes; `pp` for what stages send each other.
        """
        ...


@dataclass(frozen=True)
class Times:
    """What a step in virtual time is made of.

    Attributes:
        operators: seconds of calls.
        collectives: seconds of what ranks do together.
        launch_s: seconds that the host takes to start a call on a device that computes by itself; 0 where host and
            device are one. The host runs ahead, and the device waits for it where its calls are shorter.
        overlap: collectives go on while a rank computes. On a host they take a core of the ranks that compute, so they
            are counted where they are waited for, and nothing is hidden.
        shares_memory: ranks exchange where tensors lie, see `runtime.shared`; otherwise what is received is new.
        constant_s: seconds of a step whatever it computes.
        source: who says so, in words for a table.
    """

    operators: OperatorTimes
    collectives: CollectiveTimes
    launch_s: float = 0.0
    overlap: bool = True
    shares_memory: bool = False
    constant_s: float = 0.0
    source: str = ""
