"""Recomputation changes no number: plans with it are equal to serial, and keep less."""

from __future__ import annotations

import pytest

from paceline.plan import Mesh, PipelinePlan, Plan, Recompute
from paceline.planner.flow import flow_of
from paceline.planner.stages import tell_stages
from paceline.verify.run import Comparison, Launch
from paceline.verify.subject import Subject
from tests import models


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Captured and trained serially once."""
    return Comparison(Subject("tests.models:gpt"), 2, tmp_path_factory.mktemp("gpt"))


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "tp=2", "pp=2", "sp=2"])
def test_plans_that_compute_again_are_equal_to_serial(gpt: Comparison, mesh: str) -> None:
    for recompute in (Recompute.BLOCKS, Recompute.ATTENTION) if mesh in ("dp=2", "pp=2") else (Recompute.BLOCKS,):
        report = gpt.report(Plan(Mesh.parse(mesh), recompute=recompute), Launch.INPROCESS)
        assert report.equal, report.to_json()


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "zb-v"])
def test_so_are_other_schedules(gpt: Comparison, schedule: str) -> None:
    pipeline = PipelinePlan(schedule, micro_batches=4, chunks=2 if schedule == "interleaved" else 1)
    plan = Plan(Mesh.parse("pp=2"), recompute=Recompute.BLOCKS, pipeline=pipeline)
    report = gpt.report(plan, Launch.INPROCESS)
    assert report.equal, report.to_json()


def test_forward_collectives_of_a_block_are_made_again_with_it(gpt: Comparison) -> None:
    plain, again = (
        gpt.report(Plan(Mesh.parse("tp=2"), recompute=recompute), Launch.INPROCESS)
        for recompute in (Recompute.NONE, Recompute.BLOCKS)
    )
    assert again.forward["all_reduce"].count == plain.forward["all_reduce"].count
    assert again.backward["all_reduce"].count > plain.backward["all_reduce"].count


def test_stages_keep_less() -> None:
    module, batch = models.gpt()
    kept = {}
    for policy in (Recompute.NONE, Recompute.BLOCKS):
        plan = Plan(Mesh.parse("pp=2"), recompute=policy)
        kept[policy] = sum(stage.saved_bytes for stage in tell_stages(flow_of(module, batch, plan), plan).stages)
    assert kept[Recompute.BLOCKS] < 0.6 * kept[Recompute.NONE]
