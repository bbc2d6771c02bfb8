"""A process group for each direction and payload between two pipeline ranks, for transports that know no tags.

NCCL matches sends and receives of a pair by their order, and one that waits holds up all behind it. So two ranks that
send each other would wait in a circle, and messages of two payloads, each in its own order, would be mixed up. In a
group of its own each payload goes one way, in the order that the validator proves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from paceline.schedule import Payload

Direction = tuple[Payload, int, int]
"""A payload, and the pipeline ranks that it goes from and to."""


@dataclass(frozen=True)
class DirectedGroups:
    """The groups that this rank is a member of."""

    groups: Mapping[Direction, dist.ProcessGroup]

    def towards(self, payload: Payload, source: int, target: int) -> tuple[dist.ProcessGroup, int, int]:
        """Return the group, and which of its two ranks sends and which receives."""
        low = min(source, target)
        return self.groups[payload, source, target], int(source != low), int(target != low)


def directed_groups(pairs: Iterable[tuple[int, int]], rank: int, members: Mapping[int, int]) -> DirectedGroups:
    """Make the groups; a collective over the pipeline.

    Args:
        pairs: pipeline ranks that send each other something, in either order.
        rank: this pipeline rank.
        members: for each pipeline rank, its rank in the job.
    """
    both = {(a, b) for pair in pairs for a, b in (pair, pair[::-1]) if a != b}
    made: dict[Direction, dist.ProcessGroup] = {}
    for a, b in sorted(both, key=lambda pair: (min(pair), max(pair), pair)):  # so that nobody waits in a circle
        for payload in Payload:
            if rank in (a, b):
                ranks = sorted((members[a], members[b]))
                made[payload, a, b] = dist.new_group(ranks, use_local_synchronization=True)
    return DirectedGroups(made)


def needs_directions(group: dist.ProcessGroup) -> bool:
    """Whether the transport of a group knows no tags."""
    return "nccl" in dist.get_backend(group)
