"""A step's time in closed form: its parts, what splitting does to them, and what it costs to compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.cluster import collectives
from paceline.cluster.cluster import Cluster, Device, Group
from paceline.cluster.collectives import collective_seconds
from paceline.cluster.fabric import Fabric, Level
from paceline.cluster.rates import Rates
from paceline.schedule.formulas import ideal_bubble
from paceline.schedule.kinds import Kind
from paceline.simulator.closed_form.bubbles import waits
from paceline.simulator.closed_form.device_seconds import together
from paceline.simulator.closed_form.estimate import estimate
from paceline.simulator.closed_form.estimates import Estimates
from paceline.simulator.closed_form.transformer import transformer
from paceline.simulator.closed_form.waves import filled
from paceline.simulator.layouts import SCHEDULES, Layouts
from paceline.simulator.workload import Recompute, Workload

PEAK, BANDWIDTH = 300e12, 2e12
IDEAL = Rates(matmul=1.0, k_half=0.0, n_half=0.0, m_half=0.0, attention=1.0, memory=1.0, launch_s=0.0, overlap=1.0)
KINDS = {kind.value: kind for kind in Kind}


def cluster(rates: Rates = IDEAL, devices: int = 16384) -> Cluster:
    device = Device("device", {"bfloat16": PEAK}, 80e9, BANDWIDTH, rates)
    links = Level("links", Fabric.NVLINK, 8, 250e9, 5e-6), Level("network", Fabric.INFINIBAND, None, 25e9, 1e-5)
    return Cluster("cluster", (Group(devices, device),), links)


def model(layers: int = 16, vocabulary: int = 1024) -> Workload:
    return transformer(layers=layers, hidden=4096, heads=32, sequence=2048, vocabulary=vocabulary)


def parts(step: Estimates) -> np.ndarray:
    return step.compute_s + sum(step.exposed_s.values()) + step.bubble_s + step.optimizer_s + step.constant_s


def test_ideal_devices_take_operations_over_peak_and_bytes_over_bandwidth() -> None:
    step = estimate(model(), Layouts.of(micro_batch=2, micro_batches=3), cluster())
    layers = model().blocks
    touched = sum(work.nbytes.on(Layouts.of(micro_batch=2)) * block.count for block in layers for work in block.work)
    assert step.compute_s[0] == pytest.approx(step.flops[0] / PEAK + 3 * np.sum(touched) / BANDWIDTH)
    assert sum(np.sum(seconds) for seconds in step.exposed_s.values()) == 0


def test_parts_add_up_for_every_layout() -> None:
    layouts = Layouts.of(
        dp=[1, 2, 4, 8], tp=[8, 4, 2, 1], pp=[1, 2, 4, 8], micro_batches=8, recompute=[0, 1, 2, 0], regions=True
    )
    step = estimate(model(), layouts, cluster(Rates(step_s=0.01, growth=0.01, gap_s=1e-6, message_s=1e-5)))
    assert parts(step) == pytest.approx(step.step_s)
    assert np.all(step.step_s > 0)


def test_recomputing_everything_does_the_forward_pass_again() -> None:
    step = estimate(model(vocabulary=1), Layouts.of(recompute=[policy.value for policy in Recompute]), cluster())
    assert step.flops[0] == step.flops[2]
    assert step.compute_s[0] < step.compute_s[1] < step.compute_s[2]
    assert step.compute_s[2] / step.compute_s[0] == pytest.approx(4 / 3, rel=0.03)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 8), (8, 8), (8, 16), (4, 64)])
def test_bubbles_are_those_of_the_schedules(name: str, ranks: int, micro_batches: int) -> None:
    chunks = {"interleaved": 4, "zb-v": 2}.get(name, 1)
    layouts = Layouts.of(pp=ranks, micro_batches=micro_batches, chunks=chunks, schedule=SCHEDULES.index(name))
    expected = ideal_bubble(KINDS[name], ranks, micro_batches, chunks=chunks)
    waited = waits(layouts)[0]
    assert waited / (micro_batches + waited) == pytest.approx(expected)


def test_no_pipeline_waits() -> None:
    assert waits(Layouts.of(micro_batches=7, schedule=[0, 1, 2, 3, 4])).tolist() == [0] * 5


def test_sums_of_gradients_hide_behind_the_backward_pass_up_to_its_length() -> None:
    layouts = Layouts.of(dp=64, micro_batch=[1, 64], overlap=True)
    alone = estimate(model(), replace(layouts, overlap=np.zeros(2, dtype=bool)), cluster())
    beside = estimate(model(), layouts, cluster())
    assert alone.exposed_s["dp"][0] > beside.exposed_s["dp"][0] > 0  # a short backward pass hides a part
    assert beside.exposed_s["dp"][1] == pytest.approx(0, abs=1e-12)  # a long one all of it


def test_zero_3_gathers_parameters_twice_in_each_micro_batch() -> None:
    layouts = Layouts.of(fsdp=8, zero=[1, 2, 3], micro_batches=4, overlap=False)
    step = estimate(model(), layouts, cluster())
    elements = sum(float(piece.value * block.count) for block in model().blocks for piece in block.parameters)
    gather = collective_seconds(cluster(), "all_gather", 2 * elements, 8, 1)
    scatter = collective_seconds(cluster(), "reduce_scatter", 4 * elements, 8, 1)
    assert step.exposed_s["fsdp"][0] == pytest.approx(gather + scatter)
    assert step.exposed_s["fsdp"][1] == pytest.approx(gather + scatter)
    assert step.exposed_s["fsdp"][2] == pytest.approx(4 * (2 * gather + scatter))
    assert step.link_bytes["links"][2] > step.link_bytes["links"][0]


def test_a_parted_optimizer_takes_its_part_of_the_time() -> None:
    step = estimate(model(), Layouts.of(dp=[8, 8, 1], fsdp=[1, 1, 8], zero=[0, 1, 1]), cluster())
    assert step.optimizer_s[1] == pytest.approx(step.optimizer_s[0] / 8)
    assert step.optimizer_s[2] == pytest.approx(step.optimizer_s[0] / 8)


def test_many_models_at_once_are_each_estimated_as_alone() -> None:
    widths, layouts = [1024, 4096], Layouts.of(tp=[1, 4], micro_batch=[8, 2])
    many = transformer(layers=[12, 24], hidden=widths, heads=16, sequence=1024, vocabulary=50304)
    together_s = estimate(many, layouts, cluster(Rates())).step_s
    for place, (layers, hidden) in enumerate(zip([12, 24], widths, strict=True)):
        one = transformer(layers=layers, hidden=hidden, heads=16, sequence=1024, vocabulary=50304)
        alone = estimate(one, layouts[np.array([place])], cluster(Rates())).step_s[0]
        assert together_s[place] == pytest.approx(alone)


def test_slow_devices_are_waited_for() -> None:
    plain = cluster()
    slow = replace(plain, groups=(*plain.groups, Group(1, plain.groups[0].device, slowdown=2.0)))
    layouts = Layouts.of(micro_batch=4)
    assert estimate(model(), layouts, slow).compute_s[0] == pytest.approx(
        2 * estimate(model(), layouts, plain).compute_s[0]
    )


def test_host_and_device_hide_each_other_by_a_norm() -> None:
    assert together(np.array(3.0), np.array(4.0), 2.0) == pytest.approx(5.0)
    assert together(np.array(0.0), np.array(4.0), 2.0) == 4.0
    assert together(np.array(3.0), np.array(4.0), 1e6) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("rows", "columns", "share"),
    [
        (128 * 10, 256 * 10, 1.0),  # 100 tiles on 100 units
        (128 * 100, 256 * 100, 1.0),
        (128 * 101, 256, 101 / 100 / 1.505),  # a second wave for one tile, half of whose idle time is lost
    ],
)
def test_products_fill_devices_in_waves_of_tiles(rows: int, columns: int, share: float) -> None:
    sizes = np.array([rows, columns, 128], dtype=np.float64)[:, None]
    assert filled(sizes, 100)[0] >= share - 1e-12
    assert filled(sizes, 100)[0] <= 1.0


def test_a_small_product_fills_a_part_of_a_device() -> None:
    small = np.array([128.0, 128.0, 128.0])[:, None]
    assert filled(small, 100)[0] <= 0.05


def test_collectives_are_costed_once_for_forty_thousand_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is arrays, never a call for each layout: as many calls for 40,000 layouts as for a few."""
    workload = transformer(
        layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, sequence=8192, vocabulary=128256, gated=True
    )
    draw = np.random.default_rng(0)
    layouts = Layouts.of(
        tp=draw.choice([1, 2, 4, 8], 40_000),
        pp=draw.choice([1, 2, 4, 8, 16], 40_000),
        sp=draw.choice([1, 2], 40_000),
        dp=draw.choice([1, 8, 64], 40_000),
        fsdp=draw.choice([1, 8], 40_000),
        zero=draw.choice([1, 2, 3], 40_000),
        micro_batches=draw.choice([16, 64], 40_000),
        recompute=draw.choice([0, 1, 2], 40_000),
        regions=draw.choice([False, True], 40_000),
    )
    calls: list[int] = []
    priced = collectives._lines

    def counted(*given: object, **named: object) -> object:
        calls.append(1)
        return priced(*given, **named)

    monkeypatch.setattr(collectives, "_lines", counted)
    few = estimate(workload, layouts[:500], cluster())
    needed = len(calls)
    calls.clear()
    many = estimate(workload, layouts, cluster())
    assert len(calls) == needed <= 40
    assert many.step_s[:500] == pytest.approx(few.step_s)
    assert np.all(np.isfinite(many.step_s))
