"""Replicas that sum their gradients through a parameter server."""

from __future__ import annotations

import numpy as np

from paceline.cluster.files import load
from paceline.simulator.closed_form.gradient_sums import exchanges, sums
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Precision


def test_one_server_is_slower_the_more_replicas_there_are() -> None:
    cluster = load("dgx-a100").of(512)
    layouts = Layouts.of(dp=[16, 64, 256, 16, 64, 256], server=[False] * 3 + [True] * 3)
    found = sums(exchanges(np.full(6, 1e8), layouts, Precision()), cluster).total["dp"]
    assert np.all(found[3:] > found[:3])
    assert found[2] < 2 * found[0], "an all-reduce hardly grows"
    assert found[5] > 10 * found[3], "a server receives from each"
