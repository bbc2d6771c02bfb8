"""What a search finds, that it finds the best, and what it says of the others."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from paceline.plan import Mesh, Plan
from paceline.planner.search.candidates.candidate import Candidate
from paceline.planner.search.certainty import certainty
from paceline.planner.search.enumeration import in_all_ways, leanest_layouts
from paceline.planner.search.question import Question
from paceline.planner.search.ranking import Ranking, search
from paceline.planner.search.reasons import why_not
from paceline.planner.search.report import to_json
from paceline.planner.search.tables import print_ranking
from paceline.simulator.closed_form.estimate import estimate
from paceline.simulator.closed_form.footprint import footprint
from paceline.simulator.workload import Recompute
from tests.planner.search.tiny import cluster, workload


def found(devices: int = 64, batch: int = 64, **options: object) -> Ranking:
    return search(workload(), cluster(devices), batch=batch, closely=lambda _: lambda one: one, **options)


def text(ranking: Ranking) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_ranking(ranking, console, top=5)
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize("memory_bytes", [80e9, 12e9])
def test_the_best_is_that_of_all_layouts_with_the_least_recomputation_that_fits(memory_bytes: float) -> None:
    ranking = found(8, 8, memory_bytes=memory_bytes)
    asked = ranking.asked
    ways = in_all_ways(leanest_layouts(asked), asked.layers)
    needs = []
    for policy in Recompute:
        needs.append(footprint(asked.workload, replace(ways, recompute=np.full(len(ways), policy.value))).total)
    least = [
        next((policy.value for policy, nbytes in zip(Recompute, each, strict=True) if nbytes <= memory_bytes), None)
        for each in zip(*needs, strict=True)
    ]
    fits = np.array([policy is not None for policy in least])
    chosen = replace(ways, recompute=np.array([policy or 0 for policy in least]))[fits]
    assert ranking.plans[0].risk_s == pytest.approx(estimate(asked.workload, chosen, asked.cluster).risk_s.min())


def test_plans_are_ranked_fit_and_have_a_mesh_each() -> None:
    ranking = found()
    risks = [plan.risk_s for plan in ranking.plans]
    assert risks == sorted(risks)
    assert all(plan.fits for plan in ranking.plans)
    meshes = [str(plan.mesh) for plan in ranking.plans]
    assert len(set(meshes)) == len(meshes) > 5
    assert {plan.mesh.size for plan in ranking.plans} == {64}


def test_figures_belong_together() -> None:
    plan = found().plans[0]
    assert plan.tokens_per_s * plan.step_s == pytest.approx(64 * 2048)
    assert plan.mfu == pytest.approx(plan.flops / plan.step_s / 64 / 312e12)
    price = cluster().price_per_device_hour
    assert price is not None
    assert plan.dollars_per_million_tokens == pytest.approx(1e6 / plan.tokens_per_s / 3600 * 64 * price)
    parts = plan.compute_s + plan.exposed + plan.bubble_s + plan.optimizer_s + plan.constant_s
    assert parts == pytest.approx(plan.step_s)


def test_a_closer_look_decides_the_order_and_what_fits() -> None:
    def contrary(asked: Question):
        def look(one: Candidate) -> Candidate:
            full = one.number("tp") == 1
            return replace(one, step_s=1 / one.step_s, memory={"parameters": 1e15} if full else one.memory)

        return look

    plain = found()
    ranking = search(workload(), cluster(), batch=64, closely=contrary)
    assert min(plan.number("tp") for plan in ranking.plans) > 1
    assert plain.plans[0].mesh != ranking.plans[0].mesh
    assert ranking.plans[0].step_s == min(plan.step_s for plan in ranking.plans)


def test_ddp_fsdp_and_megatron_are_always_shown() -> None:
    for options in ({}, {"axes": ["tp"]}, {"memory_bytes": 1e9}):
        ranking = found(8, 64, **options)
        beside = {one.name: one.plan for one in ranking.baselines}
        assert [str(plan.mesh) for plan in beside.values() if plan] == ["dp=8", "fsdp=8", "tp=8"]
        fsdp = beside["FSDP"]
        assert fsdp is not None and fsdp.number("zero") == 3
        words = text(ranking)
        assert all(f"{name} (" in words for name in beside)


def test_megatrons_rule_takes_a_node_of_tp_and_as_few_stages_as_fit() -> None:
    big = workload(layers=96, hidden=12288, heads=96)
    plan = search(big, cluster(256), batch=512, closely=lambda _: lambda one: one).baselines[2].plan
    assert plan is not None and plan.fits
    assert plan.number("tp") == 8
    shallower = search(
        big, cluster(256), batch=512, axes=["tp", "dp", "pp"], closely=lambda _: lambda one: one, memory_bytes=79e9
    )
    family = leanest_layouts(shallower.asked)
    lower = family[(family.tp == 8) & (family.pp < plan.number("pp"))]
    assert (footprint(big, lower).total > plan.limit_bytes).all()


def test_why_a_plan_lost() -> None:
    ranking = found(8, 8, memory_bytes=20e9)
    best = ranking.plans[0]
    ddp = ranking.baselines[0].plan
    assert ddp is not None and not ddp.fits
    said = why_not(ddp, best)
    assert said.startswith("does not fit: ") and "too many; " in said and said.endswith("are optimizer state")
    assert why_not(best, best) == ""
    waiting = replace(best, step_s=best.step_s + 2, bubble_s=best.bubble_s + 2)
    assert "2 s more of waiting in the pipeline (bubble)" in why_not(waiting, best)
    talking = replace(best, step_s=3 * best.step_s, exposed_s={**best.exposed_s, "dp": 2 * best.step_s})
    assert why_not(talking, best).startswith("3 times as long: ")
    assert "of communication along dp that nothing hides" in why_not(talking, best)
    again = replace(
        best, step_s=best.step_s + 1, compute_s=best.compute_s + 1, layout=replace(best.layout, recompute=np.array([2]))
    )
    assert "blocks twice among it to fit into memory" in why_not(again, best)
    wild = replace(best, spread=5.0)
    assert why_not(wild, best).startswith("not slower, but less sure: ")


def test_certainty_grows_with_the_distance_and_falls_with_the_spread() -> None:
    best = found().plans[0]
    near, far = replace(best, step_s=1.01 * best.step_s), replace(best, step_s=2 * best.step_s)
    assert 0.5 < certainty(best, near) < certainty(best, far) < 1
    assert certainty(replace(best, spread=0.01), replace(near, spread=0.01)) > certainty(best, near)
    assert certainty(best, far) + certainty(far, best) == pytest.approx(1)


def test_nothing_fits_says_what_is_missing_and_what_would_do() -> None:
    ranking = found(8, 8, memory_bytes=3e9)
    assert not ranking.plans and ranking.shortfall is not None
    lack = ranking.shortfall
    assert lack.missing_bytes == pytest.approx(sum(lack.memory.values()) - 3e9)
    assert lack.missing_bytes > 0
    more = next(near for near in lack.near if near.asked.devices > 8)
    assert sum(more.memory.values()) <= 3e9
    half = leanest_layouts(replace(more.asked, devices=more.asked.devices // 2))
    assert (footprint(ranking.asked.workload, half).total > 3e9).all()
    words = text(ranking)
    assert "nothing fits" in words and f"would fit: {more.asked.devices} devices" in words


def test_nothing_divides_names_the_nearest_number_of_devices() -> None:
    ranking = found(31, 7)
    assert ranking.shortfall is not None and ranking.shortfall.layout is None
    fewer = [near.asked.devices for near in ranking.shortfall.near if near.asked.devices < 31]
    assert fewer == [30]  # 15 stages, or 2 parts of the sequence
    assert "no mesh divides both 31 devices and a batch of 7 samples" in text(ranking)


def test_the_object_has_the_fixed_keys_and_no_infinities() -> None:
    ranking = found()
    told = json.loads(json.dumps(to_json(ranking, top=3), allow_nan=False))
    assert len(told["plans"]) == 3
    fixed = {"mesh", "schedule", "micro_batches", "step_s", "step_s_error", "tokens_per_s", "mfu", "memory_bytes"}
    assert all(fixed <= set(plan) for plan in told["plans"])
    assert [one["name"] for one in told["baselines"]] == ["DDP", "FSDP", "Megatron"]
    plan = Plan.from_dict(told["plans"][0]["plan"])
    assert plan.mesh == ranking.plans[0].mesh == Mesh.parse(told["plans"][0]["mesh"])


def test_plans_keep_what_they_are_based_on() -> None:
    plan = found().plans[0].plan(Plan(Mesh.parse("dp=2"), compile=True, bucket_bytes=5))
    assert (plan.compile, plan.bucket_bytes, plan.mesh.size) == (True, 5, 64)
