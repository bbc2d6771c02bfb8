"""What layouts are looked at: all of them, none twice, none that cannot run."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

from paceline.errors import PlanError
from paceline.planner.search.enumeration import in_all_ways, leanest_layouts
from paceline.planner.search.fitting import fitting
from paceline.planner.search.question import question
from paceline.schedule import make
from paceline.simulator.closed_form.footprint import footprint
from paceline.simulator.layouts import SCHEDULES, Layouts
from paceline.simulator.workload import Along, Recompute
from tests.planner.search.tiny import asked, cluster, workload


def rows(layouts: Layouts) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(layouts, field.name).tolist() for field in fields(layouts)), strict=True))


@pytest.mark.parametrize(("devices", "batch"), [(8, 16), (12, 24), (7, 14), (1, 4), (30, 90)])
def test_meshes_are_those_that_a_plain_loop_finds(devices: int, batch: int) -> None:
    one = asked(devices, batch)
    divisors = one.workload.divisors
    found = leanest_layouts(one)
    loop = set()
    for pp, dp, fsdp, sp, tp in product(range(1, devices + 1), repeat=5):
        if pp * dp * fsdp * sp * tp != devices or pp > 24 or batch % (dp * fsdp):
            continue
        if divisors[Along.SP] % sp or divisors[Along.TP] % tp:
            continue
        loop |= {(pp, dp, fsdp, sp, tp, size) for size in range(1, batch + 1) if batch // (dp * fsdp) % size == 0}
    names = ("pp", "dp", "fsdp", "sp", "tp", "micro_batch")
    listed = list(zip(*(getattr(found, name).tolist() for name in names), strict=True))
    assert set(listed) == loop
    assert len(listed) == len(loop)


@pytest.mark.parametrize(("devices", "batch"), [(64, 64), (24, 48), (1024, 512)])
def test_each_layout_is_there_once_and_takes_all_devices_and_samples(devices: int, batch: int) -> None:
    one = asked(devices, batch)
    ways = in_all_ways(leanest_layouts(one), one.layers)
    assert len(set(rows(ways))) == len(ways)
    assert (ways.devices == devices).all()
    assert (ways.batch == batch).all()


def test_every_schedule_that_is_proposed_can_be_made() -> None:
    one = asked(24, 12)
    ways = in_all_ways(leanest_layouts(one), one.layers)
    keys = {
        (SCHEDULES[schedule], ranks, count, chunks)
        for schedule, ranks, count, chunks in zip(
            ways.schedule.tolist(), ways.pp.tolist(), ways.micro_batches.tolist(), ways.chunks.tolist(), strict=True
        )
        if ranks > 1
    }
    assert {name for name, *_ in keys} == {"1f1b", "interleaved", "zb-h1", "zb-v"}
    for name, ranks, count, chunks in keys:
        made = make(name, ranks, count, chunks=chunks if name == "interleaved" else 1)
        assert made.stages == ranks * chunks <= 24


def test_the_least_is_given_up_that_makes_a_layout_fit() -> None:
    one = asked(8, 64, memory_bytes=12e9)
    found = fitting(one)
    assert {Recompute.NONE.value, Recompute.FULL.value} <= set(np.unique(found.layouts.recompute))
    assert (footprint(one.workload, found.layouts).total <= 12e9).all()
    more = found.layouts.recompute > 0
    less = replace(found.layouts[more], recompute=found.layouts.recompute[more] - 1)
    assert (footprint(one.workload, less).total > 12e9).all()


def test_only_allowed_axes_are_used() -> None:
    found = leanest_layouts(asked(64, 64, axes=["dp", "tp"]))
    assert {(found.fsdp.max(), found.pp.max(), found.sp.max())} == {(1, 1, 1)}
    assert found.tp.max() == 16
    assert leanest_layouts(asked(32, 64, axes=["tp"])).devices.size == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 128}, "a plan for 128 devices was asked for, but the cluster 'dgx-a100' has 64"),
        ({"devices": 0}, "ask for 1 to 64"),
        ({"batch": 0}, "the batch is 0 samples"),
        ({"axes": ["ddp"]}, "the search has no axis 'ddp'.*Did you mean 'dp'"),
    ],
)
def test_what_does_not_fit_together_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        question(workload(), cluster(64), **{"batch": 64, **options})
