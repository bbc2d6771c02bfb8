"""Parameter servers: what they receive through, and what switches that drop packets do to many senders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster
from paceline.cluster.fabric import Fabric, Level
from paceline.cluster.files import load
from paceline.cluster.incast import TIMEOUT_S, push_seconds, server_seconds


def flat(fabric: Fabric = Fabric.TCP, port_buffer: float | None = None) -> Cluster:
    level = Level("network", fabric, None, 1e9, 0.0, port_buffer=port_buffer)
    return replace(load("laptop"), levels=(level,)).of(1024)


def test_one_server_receives_from_all() -> None:
    assert push_seconds(flat(), 1e9, 1) == pytest.approx(1)
    assert push_seconds(flat(), 1e9, 16) == pytest.approx(16)
    assert push_seconds(flat(), 1e9, 16, 4) == pytest.approx(4)
    assert push_seconds(flat(), 1e9, 16, 64) == pytest.approx(1)  # now workers send no faster
    assert server_seconds(flat(), 1e9, 16) == pytest.approx(32)
    assert server_seconds(flat(), 0.0, 16) == 0


def test_workers_of_one_host_share_its_cards() -> None:
    cluster = load("v100-25gbe").of(64)
    card = cluster.levels[1].alone * cluster.levels[1].efficiency
    assert push_seconds(cluster, 1e9, 8, 1000, 8) == pytest.approx(1e9 / card, rel=0.01)
    assert push_seconds(cluster, 1e9, 63, 1000, 1) == pytest.approx(8e9 / card, rel=0.01)


def test_too_many_senders_wait_for_a_timeout_where_packets_are_dropped() -> None:
    few, many = (push_seconds(flat(port_buffer=1e6), 1e6, workers) for workers in (60, 80))
    assert few == pytest.approx(60e-3)
    assert many == pytest.approx(80e-3 + TIMEOUT_S)
    assert push_seconds(flat(Fabric.DDC, 1e6), 1e6, 80) == pytest.approx(80e-3)
    assert server_seconds(flat(port_buffer=1e6), 1e6, 80) == pytest.approx(160e-3 + TIMEOUT_S)


@given(st.floats(1, 1e10), st.integers(1, 500), st.integers(1, 64), st.sampled_from([1, 8]))
def test_more_workers_never_help_and_more_servers_never_hurt(
    nbytes: float, workers: int, servers: int, stride: int
) -> None:
    cluster = load("roce-h100").of(8192)
    found = push_seconds(
        cluster, nbytes, [workers, workers + 8 * stride, workers], [servers, servers, 2 * servers], stride
    )
    assert np.all(np.isfinite(found))
    assert found[1] >= found[0] * (1 - 1e-12)
    assert found[2] <= found[0] * (1 + 1e-12)
