"""PipeDream: 1F1B that never drains; each micro-batch is an update, and stages stash the weights they used.

Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018; Narayanan et al., "PipeDream:
Generalized Pipeline Parallelism for DNN Training", SOSP 2019.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.schedule.actions import Schedule
from paceline.schedule.one_f_one_b import one_f_one_b
from paceline.schedule.places import Replicas, depths
from paceline.schedule.updates import read_versions, update_every


def pipedream(replicas: Replicas, micro_batches: int, vertical_sync: bool = False) -> Schedule:
    """Return the schedule, with versions and updates.

    The forward pass of micro-batch `i` on stage `s` of `S` reads version `max(0, i - (S - s) + 1)`, the newest there
    is, and its backward pass the same. With `vertical_sync` all stages read what stage 0 does, `max(0, i - S + 1)`.
    The ranks of a replicated stage update together after each has done one micro-batch, so versions count rounds.
    """
    held = depths(replicas)

    def version(stage: int, micro_batch: int) -> int:
        depth = held[0] if vertical_sync else held[stage]
        return max(0, micro_batch // len(replicas[stage]) - depth + 1)

    plain = replace(one_f_one_b(replicas, micro_batches), name="pipedream")
    return update_every(read_versions(plain, version), 1)
