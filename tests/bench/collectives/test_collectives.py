"""`paceline bench collectives` at toy size, and what its figures are made of."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline.bench.collectives.exchanges import Exchange, Kind
from paceline.bench.collectives.expected import expected_cluster, expected_seconds
from paceline.bench.collectives.jobs import Way, _checked, repetitions
from paceline.bench.collectives.main import Settings, _summary, main
from paceline.bench.collectives.table import print_tables
from paceline.bench.groups import GLOO, Groups
from paceline.cluster.collectives import collective_seconds
from paceline.cluster.files import load, save
from paceline.errors import ClusterError, RecipeError
from paceline.runtime.job.world import World
from paceline.simulator.calibration.calibrate import default_path
from tests.ranks import ranks


def test_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(json.dumps(main({"sizes": "64,4k", "ranks": "2", "rounds": "2", "cluster": "none"})))
    in_place = {"shm_in_place_us", "gloo_over_in_place", "in_place_over_bound"}
    expected = {"shm_us", "gloo_us", "bound_us", "gloo_over_shm"}
    if result["machine"]["shm"] == "shared memory":  # in Python, where there is no compiler, nothing is in place
        expected |= in_place
    assert set(result["collectives"]) == {"2"}
    kinds = result["collectives"]["2"]
    assert set(kinds) == {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"}
    for sizes in kinds.values():
        assert set(sizes) == {"64", "4096"}
        for found in sizes.values():
            figures = {key: value for key, value in found.items() if key not in ("gb_s", "spread")}
            assert set(figures) == set(found["spread"]) == expected
            assert all(math.isfinite(value) and value > 0 for value in figures.values())
            assert {f"{way}_us" for way in found["gb_s"]} == {key for key in expected if key.endswith("_us")}
    assert result["machine"]["cores"] >= 1 and result["machine"]["shm"].startswith("shared memory")
    assert "all_reduce, 2 ranks" in capsys.readouterr().out


def test_expected_stands_beside_measured() -> None:
    times = {str(way): [[1e-3, 2e-3]] for way in Way}
    expected = expected_seconds(load("laptop"), Exchange(Kind.ALL_REDUCE, 4096, ranks=2))
    found = _summary(4096, [times] * 2, expected)
    assert found["expected"]["us"] == pytest.approx(expected * 1e6)
    assert found["expected"]["gb_s"] == pytest.approx(4096 / expected * 1e-9)
    machine: dict[str, Any] = {"cores": 2, "processor": "P", "torch": "T", "load_before": 0.0, "shm": "S"}
    settings = {"rounds": 1, "cluster": "laptop"}
    result = {"collectives": {"2": {"all_reduce": {"4096": found}}}, "settings": settings, "machine": machine}
    console = Console(width=180, file=io.StringIO())
    print_tables(console, result)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "the cluster 'laptop'" in text and "expected," in text
    assert f"{found['expected']['gb_s'] * 1e3:.0f}" in text


def test_an_all_to_all_is_counted_as_all_ranks_send_it() -> None:
    cluster = load("laptop")
    each = expected_seconds(cluster, Exchange(Kind.ALL_TO_ALL, 1 << 20, ranks=4))
    assert each == pytest.approx(float(collective_seconds(cluster.of(4), "all_to_all", 4 << 20, 4, 1)))


def test_the_cluster_that_was_calibrated_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert expected_cluster("auto") is None and expected_cluster("none") is None
    save(load("laptop"), default_path())
    assert expected_cluster("auto") == load("laptop")
    monkeypatch.setenv("PACELINE_CACHE", "off")
    assert expected_cluster("auto") is None
    with pytest.raises(ClusterError, match="Did you mean 'dgx-h100'"):
        expected_cluster("dgx-h10")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round": "3"}, "Did you mean 'rounds'?"),
        ({"sizes": "64,4q"}, "there is '4q' in sizes; a size is a number of bytes, such as 64, 4k or 16M"),
        ({"sizes": "0"}, "a size is a number of bytes"),
        ({"sizes": "20", "ranks": "2"}, "20 bytes cannot be divided among 2 ranks"),
        ({"ranks": "2,one"}, "ranks is 'one'; it is a whole number from 2"),
        ({"kinds": "all_reduce,all_gathr"}, "Did you mean 'all_gather'?"),
    ],
)
def test_settings_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        Settings.read(options)
    assert message in str(error.value)


def test_settings() -> None:
    assert Settings.read({}).sizes[0] == 64 and Settings.read({}).sizes[-1] == 64 << 20
    read = Settings.read({"sizes": "64,4k,16M,64", "ranks": "4", "kinds": "broadcast", "rounds": "3"})
    assert read == Settings((64, 4 << 10, 16 << 20), (4,), (Kind.BROADCAST,), 3)
    assert Settings.read({"cluster": "laptop"}).cluster == "laptop"


@pytest.mark.parametrize(
    ("kind", "given", "taken", "bound", "result"),
    [
        (Kind.ALL_REDUCE, 4, 0, 16, [100.0, 102.0, 104.0, 106.0]),
        (Kind.REDUCE_SCATTER, 4, 2, 12, [104.0, 106.0]),
        (Kind.ALL_GATHER, 2, 4, 16, [0.0, 1.0, 100.0, 101.0]),
        (Kind.ALL_TO_ALL, 4, 4, 16, [2.0, 3.0, 102.0, 103.0]),
        (Kind.BROADCAST, 4, 0, 16, [0.0, 1.0, 2.0, 3.0]),
    ],
)
def test_what_rank_1_of_2_does_with_16_bytes(
    kind: Kind, given: int, taken: int, bound: int, result: list[float]
) -> None:
    exchange = Exchange(kind, size=16, ranks=2)
    assert (exchange.given, exchange.taken, exchange.bound) == (given, taken, bound)
    ranks_give = [torch.arange(given) + 100.0 * rank for rank in range(2)]
    assert exchange.result(1, ranks_give).tolist() == result


@ranks(2)
def test_a_wrong_result_is_no_figure(world: World) -> None:
    tensors = torch.empty(16), torch.empty(0)
    group = Groups().on(GLOO)
    _checked(Exchange(Kind.ALL_REDUCE, 64, ranks=2), world.rank, group, *tensors)
    with pytest.raises(RuntimeError, match="all_reduce of 64 bytes on gloo gave a wrong result"):
        _checked(Exchange(Kind.ALL_REDUCE, 64, ranks=3), world.rank, group, *tensors)  # a rank more than there is


def test_a_figure_is_of_the_slowest_rank_and_a_ratio_of_one_round() -> None:
    slow, fast = [[2e-6, 4e-6, 2e-6], [20e-6, 20e-6, 20e-6]], [[1e-6, 1e-6, 3e-6], [1e-6, 1e-6, 1e-6]]
    twice = [[8e-6] * 3, [80e-6] * 3]
    ways = {Way.SHM: slow, Way.SHM_IN_PLACE: slow, Way.GLOO: twice, Way.BOUND: fast}
    other = {Way.SHM: fast, Way.SHM_IN_PLACE: fast, Way.GLOO: fast, Way.BOUND: fast}
    found = _summary(1000, [ways, other])
    assert found["shm_us"] == pytest.approx(12.0)  # of 2, 4, 3 and 20, 20, 20
    assert found["spread"]["shm_us"]["min"] == pytest.approx(2.0)
    assert found["gloo_over_shm"] == pytest.approx((8 / 3 + 80 / 20) / 2)
    assert found["in_place_over_bound"] == pytest.approx((3 / 1 + 20 / 1) / 2)
    assert found["gb_s"]["bound"] == pytest.approx(1.0)


def test_small_ones_are_repeated_more_often() -> None:
    counts = [repetitions(size) for size in (64, 1 << 20, 64 << 20)]
    assert counts == sorted(counts, reverse=True) and counts[-1] > 1


@pytest.mark.parametrize(("count", "crowded"), [(2, False), (4, True)])
def test_the_table_says_when_there_are_more_ranks_than_cores(count: int, crowded: bool) -> None:
    times = {str(way): [[1e-3, 2e-3]] for way in Way}
    machine: dict[str, Any] = {"cores": 2, "processor": "P", "torch": "T", "load_before": 0.0, "shm": "S"}
    sizes = {"4096": _summary(4096, [times] * count)}
    result = {"collectives": {str(count): {"all_reduce": sizes}}, "settings": {"rounds": 1}, "machine": machine}
    console = Console(width=160, file=io.StringIO())
    print_tables(console, result)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert ("more ranks than cores (2)" in text) is crowded
    assert "4k" in text and "1500 (1250-1750)" in text
