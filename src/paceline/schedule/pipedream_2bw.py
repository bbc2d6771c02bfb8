"""PipeDream-2BW: batches follow each other without draining, and two versions of the weights are enough.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.schedule.actions import Schedule
from paceline.schedule.one_f_one_b import one_f_one_b
from paceline.schedule.places import one_each
from paceline.schedule.updates import read_versions, update_every


def pipedream_2bw(ranks: int, micro_batches: int, batches: int) -> Schedule:
    """Return the schedule of `batches` batches of `micro_batches`, with versions and updates.

    Batch `b` reads version `max(0, b - 1)` on every stage: the gradient is one batch late. This wants at least as many
    micro-batches in a batch as there are stages; else a third version would be in use.
    """
    plain = replace(one_f_one_b(one_each(ranks), micro_batches * batches), name="pipedream-2bw")
    versioned = read_versions(plain, lambda stage, micro_batch: max(0, micro_batch // micro_batches - 1))
    return update_every(versioned, micro_batches)
