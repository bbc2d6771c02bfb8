"""What a pipeline adds to its slowest rank's work: the formulas of `schedule.formulas`, for many layouts at once."""

from __future__ import annotations

import numpy as np

from paceline.simulator.layouts import SCHEDULES, Layouts
from paceline.simulator.workload import Numbers


def waits(layouts: Layouts) -> Numbers:
    """Return how many micro-batches' worth of one rank's work a rank waits for, where all ranks have as much.

    A bubble of share b leaves 1 / (1 - b) = 1 + waits / micro_batches of the work.
    """
    ranks, micro_batches, chunks = layouts.pp, layouts.micro_batches, layouts.chunks
    filled = -(-micro_batches // ranks) * ranks  # interleaved schedules take micro-batches by the number of ranks
    plain = ranks - 1
    by_name = {
        "1f1b": plain,
        "gpipe": plain,
        "interleaved": filled - micro_batches + plain / chunks,
        "zb-h1": (plain + np.maximum(ranks - micro_batches, 0)) / 3,
        "zb-v": (plain + np.maximum(3 * ranks - 1 - 2 * micro_batches, 0)) / 6,
    }
    found = np.choose(layouts.schedule, [np.asarray(by_name[name], dtype=np.float64) for name in SCHEDULES])
    return np.asarray(np.where(ranks > 1, found, 0.0))
