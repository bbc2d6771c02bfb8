"""Files of clusters: those that come with the package, what is refused and how, and that they come back exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.cluster import Cluster, Measured
from paceline.cluster.fabric import Fabric, Level
from paceline.cluster.files import devices, load, names, save, to_yaml
from paceline.cluster.units import Unit, read, write
from paceline.errors import ClusterError

ROOT = Path(__file__).parents[2]
SHIPPED = """b200 ddc-h100 dgx-a100 dgx-h100 gb200-nvl72 h200 laptop roce-h100 tpu-v4 tpu-v5p v100-25gbe vtrain-a100"""

SMALL = """
devices: 16
device: {name: thing, peak: {float32: 1 TFLOP/s}, memory: 8 GiB, bandwidth: 100 GB/s}
levels:
  - {name: inside, fabric: pcie, devices: 4, bandwidth: 12 GB/s, latency: 5 us}
  - {name: outside, fabric: tcp, nic: 10 Gb/s, nics_per_device: 0.25, latency: 30 us}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ClusterError) as found:
        load(written(tmp_path, text))
    return str(found.value)


@pytest.mark.parametrize("name", names())
def test_shipped_clusters_come_back_exactly_and_name_their_sources(name: str, tmp_path: Path) -> None:
    cluster = load(name)
    save(cluster, tmp_path / "copy.yaml")
    assert load(tmp_path / "copy.yaml") == cluster
    assert cluster.name == name
    assert all(level.source for level in cluster.levels)
    assert all(group.device.source for group in cluster.groups)
    if cluster.price_per_device_hour is not None:
        assert cluster.sources["price_per_device_hour"]
    if cluster.failures_per_device_hour:
        assert cluster.sources["failures_per_device_hour"]


def test_the_clusters_that_users_ask_for_are_there() -> None:
    assert names() == SHIPPED.split()
    assert {path.name for path in (ROOT / "clusters").glob("*.yaml")} == {f"{name}.yaml" for name in names()}
    assert "a100-sxm-80gb" in devices()


def test_cards_of_a_host_are_shared(tmp_path: Path) -> None:
    level = load(written(tmp_path, SMALL)).levels[1]
    assert level.bandwidth == 10e9 / 8 / 4
    assert level.alone == 10e9 / 8


def test_a_slow_device_is_a_group_of_one(tmp_path: Path) -> None:
    cluster = load(written(tmp_path, SMALL + "slow: [{rank: 5, slowdown: 1.5}, {rank: 15, link_slowdown: 2}]"))
    assert [(it.devices, it.slowdown, it.link_slowdown) for it in cluster.groups] == [
        (5, 1, 1),
        (1, 1.5, 1),
        (9, 1, 1),
        (1, 1, 2),
    ]
    assert cluster.devices == 16
    assert cluster.slowest.slowdown == 1.5
    assert cluster.of(4).slowest.slowdown == 1


def test_groups_of_two_kinds(tmp_path: Path) -> None:
    text = """
groups:
  - {devices: 8, device: h100-sxm-80gb}
  - {devices: 8, device: a100-sxm-80gb, link_slowdown: 1.5}
levels: [{name: nvlink, fabric: nvlink, devices: 8, bandwidth: 300 GB/s, latency: 5 us},
         {name: ib, fabric: infiniband, nic: 200 Gb/s, latency: 10 us}]
"""
    cluster = load(written(tmp_path, text))
    assert cluster.slowest.device.name == "a100-sxm-80gb"
    save(cluster, tmp_path / "copy.yaml")
    assert replace(load(tmp_path / "copy.yaml"), name="mine") == cluster
    with pytest.raises(ClusterError, match="2 groups"):
        cluster.of(32)


def test_as_many_devices_as_there_are() -> None:
    assert load("dgx-a100").of(100_000).devices == 100_000
    assert load("dgx-a100").of(12).hosts == 2
    with pytest.raises(ClusterError, match="1 to 24576 devices, not 30000"):
        load("roce-h100").of(30_000)
    with pytest.raises(ClusterError, match="not 0"):
        load("laptop").of(0)


def test_what_is_refused_says_where_and_what_instead(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"no cluster 'dgx-h10'. Did you mean 'dgx-h100'"):
        load("dgx-h10")
    with pytest.raises(ClusterError, match=r"there is no cluster .*mine.yml; clusters there: mine.yaml"):
        written(tmp_path, SMALL)
        load(tmp_path / "mine.yml")
    said = refused(tmp_path, SMALL.replace("latency: 5 us", "latencies: 5 us"))
    assert "line 5: unknown key 'levels.0.latencies'. Did you mean 'latency'?" in said
    said = refused(tmp_path, SMALL.replace("12 GB/s", "12 GByte"))
    assert "line 5" in said and "cannot read '12 GByte'; write a quantity such as 25 GB/s" in said
    said = refused(tmp_path, SMALL.replace("fabric: pcie", "fabric: pci"))
    assert "line 5" in said and "Did you mean 'pcie'?" in said
    said = refused(tmp_path, SMALL.replace("nic: 10 Gb/s, ", ""))
    assert "line 6" in said and "level 'outside' needs either 'bandwidth'" in said
    said = refused(tmp_path, SMALL.replace("devices: 4, ", ""))
    assert "only the last level may hold all there are" in said
    said = refused(tmp_path, SMALL.replace("{name: thing, peak", "a100-80gb\nother: {name: thing, peak"))
    assert "line 3: there is no device 'a100-80gb'. Did you mean 'a100-sxm-80gb'" in said
    assert "two levels are called 'inside'" in refused(tmp_path, SMALL.replace("name: outside", "name: inside"))
    assert "only the first level may be one" in refused(tmp_path, SMALL.replace("fabric: tcp", "fabric: torus"))
    said = refused(tmp_path, SMALL + "measured: [{collective: allreduce, size: 2, points: [[1 MB, 1 ms]]}]")
    assert "'allreduce' is no collective. Did you mean 'all_reduce'" in said
    said = refused(tmp_path, SMALL + "measured: [{collective: send, size: 2, points: [[1e6, 1 ms], [1 MB, 2 ms]]}]")
    assert "each size is measured once" in said
    said = refused(tmp_path, SMALL + "slow: [{rank: 16, slowdown: 2}]")
    assert "rank 16 is slow in a cluster of 16 devices" in said
    said = refused(tmp_path, SMALL + "groups: [{devices: 2, device: h100-sxm-80gb}]")
    assert "either 'devices', how many, and 'device'" in said
    said = refused(tmp_path, SMALL.replace("8 GiB", "!!python/object/apply:os.getcwd []"))
    assert "not valid YAML" in said


def test_a_device_of_ones_own_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "mine.yaml").write_text("{peak: {float32: 1e12}, memory: 1 GB, bandwidth: 1e10}")
    text = SMALL.replace("{name: thing, peak: {float32: 1 TFLOP/s}, memory: 8 GiB, bandwidth: 100 GB/s}", "mine")
    assert load(written(tmp_path, text)).groups[0].device.memory_bytes == 1e9
    (tmp_path / "devices" / "mine.yaml").write_text("{peak: {float32: 1e12}, memory: 1 GB,\n bandwith: 1e10}")
    assert "devices/mine.yaml, line 2: unknown key 'device.bandwith'" in refused(tmp_path, text)


def test_measured_collectives_come_back(tmp_path: Path) -> None:
    measured = (Measured("all_reduce", 2, ((1024.0, 1e-5), (1e6, 3.25e-4))),)
    cluster: Cluster = replace(load("laptop"), measured=measured)
    save(cluster, tmp_path / "here.yaml")
    assert load(tmp_path / "here.yaml") == cluster


levels = st.builds(
    Level,
    name=st.sampled_from(["nvlink", "a b", "1", "yes"]),
    fabric=st.sampled_from(list(Fabric)),
    devices=st.none(),
    bandwidth=st.floats(1, 1e15),
    latency_s=st.floats(0, 1),
    start_s=st.floats(0, 1),
    efficiency=st.floats(0.01, 1),
    small_groups=st.dictionaries(st.integers(2, 9), st.floats(0.01, 1)),
    oversubscription=st.floats(1, 100),
    nics_per_device=st.floats(0.01, 4),
    flows=st.integers(1, 99),
    paths=st.none() | st.integers(1, 99),
    rails=st.integers(1, 8),
    in_switch=st.none() | st.floats(0.01, 1),
    in_switch_s=st.floats(0, 1),
    eager=st.floats(0.01, 1),
    handshake_s=st.floats(0, 1),
    port_buffer=st.none() | st.floats(1, 1e9),
    axes=st.integers(1, 3),
    source=st.sampled_from(["", "a: b, c # d", "2026-01-01", "é"]),
)


@given(levels)
def test_any_level_comes_back_exactly(level: Level) -> None:
    cluster = replace(load("laptop"), levels=(level,))
    with TemporaryDirectory() as folder:
        save(cluster, Path(folder) / "copy.yaml")
        assert load(Path(folder) / "copy.yaml") == cluster


@given(st.floats(1e-12, 1e18), st.sampled_from(list(Unit)))
def test_quantities_come_back_exactly(value: float, unit: Unit) -> None:
    assert read(write(value, unit), unit) == value


def test_quantities_as_people_write_them() -> None:
    assert read("200 Gb/s", Unit.BYTES_PER_SECOND) == 25e9
    assert read("80 GiB", Unit.BYTES) == 80 * 2**30
    assert read("5us", Unit.SECONDS) == 5e-6
    assert write(5e-6, Unit.SECONDS) == "5 us"
    for wrong in ("-3 us", "5 years", "nan", True, float("nan"), -1, [5]):
        with pytest.raises(ClusterError):
            read(wrong, Unit.SECONDS)


def test_text_is_for_people() -> None:
    text = to_yaml(load("vtrain-a100"))
    assert "bandwidth: 12.5 GB/s" in text and "latency: 5 us" in text and "memory: 79.15 GiB" in text
