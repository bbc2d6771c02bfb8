"""What collectives take: properties that hold on every cluster, and figures that follow from its description."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import algorithms
from paceline.cluster.algorithms import Priced
from paceline.cluster.cluster import Cluster, Group, Measured
from paceline.cluster.collectives import KINDS, collective_seconds, link_bytes
from paceline.cluster.fabric import Fabric, Level
from paceline.cluster.files import load, names
from paceline.cluster.reach import Groups, crossings
from paceline.errors import ClusterError

CLUSTERS = [load(name) for name in names()]

clusters = st.sampled_from(CLUSTERS)
kinds = st.sampled_from(KINDS)
sizes = st.integers(1, 96)
strides = st.sampled_from([1, 2, 3, 8, 16, 24, 64])
bytes_ = st.floats(1, 1e11)


def seconds(cluster: Cluster, kind: str, nbytes: float, size: int, stride: int, sharing: float | None = None) -> float:
    wide = cluster.of(min(max(cluster.devices, size * stride), cluster.levels[-1].devices or 10**9))
    return float(collective_seconds(wide, kind, nbytes, size, stride, sharing=sharing))


@given(clusters, kinds, bytes_, bytes_, sizes, strides)
def test_more_bytes_never_take_less(
    cluster: Cluster, kind: str, one: float, other: float, size: int, stride: int
) -> None:
    few, many = sorted((one, other))
    assert 0 <= seconds(cluster, kind, few, size, stride) <= seconds(cluster, kind, many, size, stride) < np.inf


@given(clusters, kinds, bytes_, sizes, strides, st.floats(1, 20), st.integers(0, 3))
def test_oversubscription_never_helps(
    cluster: Cluster, kind: str, nbytes: float, size: int, stride: int, times: float, which: int
) -> None:
    levels = list(cluster.levels)
    index = which % len(levels)
    levels[index] = replace(levels[index], oversubscription=levels[index].oversubscription * times)
    worse = replace(cluster, levels=tuple(levels))
    assert seconds(worse, kind, nbytes, size, stride) >= seconds(cluster, kind, nbytes, size, stride) * (1 - 1e-12)


@given(clusters, kinds, bytes_, sizes, strides, st.floats(1, 5))
def test_slow_links_and_more_latency_never_help(
    cluster: Cluster, kind: str, nbytes: float, size: int, stride: int, times: float
) -> None:
    usual = seconds(cluster, kind, nbytes, size, stride)
    slow = replace(cluster, groups=tuple(replace(group, link_slowdown=times) for group in cluster.groups))
    assert seconds(slow, kind, nbytes, size, stride) >= usual * (1 - 1e-12)
    late = replace(cluster, levels=tuple(replace(it, latency_s=it.latency_s * times) for it in cluster.levels))
    assert seconds(late, kind, nbytes, size, stride) >= usual * (1 - 1e-12)


@given(clusters, kinds, bytes_, strides, st.floats(1, 64))
def test_alone_takes_nothing_and_company_never_helps(
    cluster: Cluster, kind: str, nbytes: float, stride: int, sharing: float
) -> None:
    assert seconds(cluster, kind, nbytes, 1, stride) == 0
    shared = seconds(cluster, kind, nbytes, 16, stride, sharing)
    assert shared >= seconds(cluster, kind, nbytes, 16, stride, 1) * (1 - 1e-12)
    assert shared <= seconds(cluster, kind, nbytes, 16, stride) * (1 + 1e-12)


@given(clusters, bytes_, sizes, strides)
def test_an_all_reduce_is_never_slower_than_its_halves(cluster: Cluster, nbytes: float, size: int, stride: int) -> None:
    halves = [seconds(cluster, kind, nbytes, size, stride) for kind in ("reduce_scatter", "all_gather")]
    assert halves[0] == halves[1]
    assert seconds(cluster, "all_reduce", nbytes, size, stride) <= sum(halves) * (1 + 1e-12)


def test_rings_as_in_the_textbook() -> None:
    """Thakur et al.: (p - 1) latencies and (p - 1) / p of the bytes for each half."""
    level = Level("wire", Fabric.TCP, None, 1e9, 1e-4)
    cluster = replace(load("laptop"), levels=(level,)).of(7)
    ones = np.ones(1)
    groups = Groups(7 * ones, ones, ones, ones)
    line = algorithms.ring([Priced(it, it.rate, it.level.latency_s) for it in crossings(cluster, groups)], groups.size)
    assert line.wait_s == pytest.approx(6e-4)
    assert line.per_byte_s == pytest.approx(6 / 7 * 1e-9)
    assert seconds(cluster, "all_gather", 7e9, 7, 1) == pytest.approx(6 + 6e-4)
    assert seconds(cluster, "all_reduce", 7e9, 7, 1) == pytest.approx(12 + 12e-4)


def test_large_groups_use_all_cards_of_a_host() -> None:
    cluster = load("vtrain-a100")
    whole_hosts = seconds(cluster, "all_reduce", 1e10, 64, 1)
    card = cluster.levels[1].alone * cluster.levels[1].efficiency
    assert whole_hosts == pytest.approx(2 * 63 / 64 * 1e10 / (4 * card), rel=0.01)
    one_of_each = seconds(cluster, "all_gather", 1e10, 8, 8, sharing=1)
    assert one_of_each == pytest.approx(7 / 8 * 1e10 / card, rel=0.01)
    all_eight_share = seconds(cluster, "all_gather", 1e10, 8, 8, sharing=8)
    assert all_eight_share == pytest.approx(2 * one_of_each, rel=0.01)
    assert (
        all_eight_share == seconds(cluster, "all_gather", 1e10, 8, 8) == seconds(cluster, "all_gather", 1e10, 8, 8, 64)
    )


def test_groups_that_straddle_hosts_leave_them() -> None:
    cluster = load("dgx-h100")
    inside, straddling = seconds(cluster, "all_gather", 1e9, 4, 1), seconds(cluster, "all_gather", 1e9, 3, 1)
    assert straddling > 2 * inside
    assert link_bytes(cluster, "all_gather", 1e9, 4, 1)["infiniband"] == 0
    assert link_bytes(cluster, "all_gather", 1e9, 3, 1)["infiniband"] > 0
    assert seconds(cluster.of(3), "all_gather", 1e9, 3, 1) <= inside * 1.01


def test_a_torus_uses_the_axes_that_a_group_spans() -> None:
    cluster = load("tpu-v4").of(512)  # 8 x 8 x 8
    link = cluster.levels[0].bandwidth / 6 * cluster.levels[0].efficiency
    assert seconds(cluster, "all_gather", 1e10, 8, 1) == pytest.approx(7 / 8 * 1e10 / (2 * link), rel=0.01)
    assert seconds(cluster, "all_gather", 1e10, 8, 8) == pytest.approx(7 / 8 * 1e10 / (2 * link), rel=0.01)
    assert seconds(cluster, "all_gather", 1e10, 64, 1) == pytest.approx(63 / 64 * 1e10 / (4 * link), rel=0.01)
    assert seconds(cluster, "all_gather", 1e10, 512, 1) == pytest.approx(511 / 512 * 1e10 / (6 * link), rel=0.01)
    # Four of eight chips are no ring: data go one way only.
    assert seconds(cluster, "all_gather", 1e10, 4, 1) == pytest.approx(3 / 4 * 1e10 / link, rel=0.01)


def test_hashes_hurt_few_flows_and_cells_none() -> None:
    def of(fabric: Fabric, flows: int) -> float:
        inside = Level("inside", Fabric.NVLINK, 8, 450e9, 0)
        leaf = Level("leaf", fabric, 64, 50e9, 0)
        spine = Level("spine", fabric, None, 50e9, 0, flows=flows)
        cluster = replace(load("dgx-h100"), levels=(inside, leaf, spine))
        return seconds(cluster, "all_gather", 1e10, 16, 64, sharing=8)

    assert of(Fabric.DDC, 1) == of(Fabric.INFINIBAND, 1) == pytest.approx(15 / 16 * 1e10 / 50e9)
    one, many, most = of(Fabric.ROCE, 1), of(Fabric.ROCE, 16), of(Fabric.ROCE, 1024)
    assert one > 3 * of(Fabric.DDC, 1)
    assert one > many > most > of(Fabric.DDC, 1)
    assert most < 1.2 * of(Fabric.DDC, 1)


def test_sums_in_switches_pay_for_many_members_only() -> None:
    """The published points: NVLink SHARP is of no use to four H200 and gives eight a third more."""
    cluster = load("h200")
    without = replace(cluster, levels=tuple(replace(level, in_switch=None) for level in cluster.levels))
    four, eight = (
        seconds(without, "all_reduce", 8e9, n, 1) / seconds(cluster, "all_reduce", 8e9, n, 1) for n in (4, 8)
    )
    assert four < 1.05
    assert 1.25 < eight < 1.4
    assert seconds(without, "all_gather", 8e9, 8, 1) == seconds(cluster, "all_gather", 8e9, 8, 1)


def test_bytes_by_level_are_those_of_a_ring() -> None:
    cluster = load("dgx-h100")
    sent = link_bytes(cluster, "all_reduce", 8e6, 16, 1)
    assert sum(sent.values()) == pytest.approx(2 * 15 / 16 * 8e6)
    assert sent["infiniband"] == pytest.approx(2 * 15 / 16 * 8e6 * 2 / 16)
    apart = link_bytes(cluster, "all_to_all", 16e6, 16, 1)
    assert (apart["nvlink"], apart["infiniband"]) == (pytest.approx(7e6 / 16), pytest.approx(8e6 / 16))
    assert link_bytes(cluster, "send", 1e6, 4, 8) == {"nvlink": 0, "infiniband": 1e6}
    assert link_bytes(cluster, "send", 1e6, 4, 1) == {"nvlink": 1e6, "infiniband": 0}


@given(clusters, st.sampled_from(["all_gather", "all_reduce", "all_to_all"]), sizes, strides)
def test_bytes_by_level_add_up(cluster: Cluster, kind: str, size: int, stride: int) -> None:
    wide = cluster.of(min(max(cluster.devices, size * stride), cluster.levels[-1].devices or 10**9))
    whole = {"all_gather": 1.0, "all_reduce": 2.0, "all_to_all": 1 / size}[kind] * (size - 1) / size
    assert sum(float(it) for it in link_bytes(wide, kind, 1.0, size, stride).values()) == pytest.approx(whole)


def test_what_was_measured_counts() -> None:
    measured = Measured("all_reduce", 2, ((1e3, 1e-4), (1e6, 1e-3), (2e6, 3e-3)))
    cluster = replace(load("laptop"), measured=(measured,))
    assert seconds(cluster, "all_reduce", 10, 2, 1) == pytest.approx(1e-4)
    assert seconds(cluster, "all_reduce", 1e6, 2, 1) == pytest.approx(1e-3)
    assert 1e-4 < seconds(cluster, "all_reduce", 3e4, 2, 1) < 1e-3
    assert seconds(cluster, "all_reduce", 4e6, 2, 1) == pytest.approx(7e-3)
    assert seconds(cluster, "all_reduce", 1e6, 4, 1) == seconds(load("laptop"), "all_reduce", 1e6, 4, 1)
    assert seconds(cluster, "all_gather", 1e6, 2, 1) == seconds(load("laptop"), "all_gather", 1e6, 2, 1)


def test_the_slowest_links_of_a_mixed_cluster_count() -> None:
    cluster = load("dgx-a100").of(16)
    group = cluster.groups[0]
    mixed = replace(cluster, groups=(replace(group, devices=15), Group(1, group.device, link_slowdown=3.0)))
    assert seconds(mixed, "all_gather", 1e9, 16, 1) == pytest.approx(
        3 * seconds(cluster, "all_gather", 1e9, 16, 1), rel=0.02
    )
    assert seconds(mixed.of(8), "all_gather", 1e9, 8, 1) == seconds(cluster, "all_gather", 1e9, 8, 1)


@settings(max_examples=20)
@given(clusters, kinds, st.lists(st.tuples(bytes_, sizes, strides), min_size=1, max_size=50))
def test_arrays_are_what_their_elements_are(cluster: Cluster, kind: str, rows: list[tuple[float, int, int]]) -> None:
    together = collective_seconds(cluster, kind, *np.array(rows).T)
    apart = [float(collective_seconds(cluster, kind, *row)) for row in rows]
    np.testing.assert_allclose(together, apart, rtol=1e-12)


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"'allreduce' is no collective. Did you mean 'all_reduce'"):
        collective_seconds(load("laptop"), "allreduce", 1, 2, 1)
