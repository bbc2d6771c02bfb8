"""Recomputation changes no number: plans with it are equal to serial, and keep less."""

from __future__ import annotations

import pytest

from paceline.plan import Mesh, PipelinePlan, Plan, Recompute
from paceline.planner.flow import flow_of
from paceline.planner.stages import tell_stages
from paceline.verify.run import verify
from tests import models


@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [(mesh, "blocks") for mesh in ("dp=2", "fsdp=2", "tp=2", "pp=2", "sp=2")]
    + [("dp=2", "attention"), ("pp=2", "attention")],
)
def test_plans_that_compute_again_are_equal_to_serial(mesh: str, recompute: str) -> None:
    report = verify("tests.models:gpt", mesh, launch="inprocess", recompute=recompute)
    assert report.equal, report.to_json()


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "zb-v"])
def test_so_are_other_schedules(schedule: str) -> None:
    pipeline = PipelinePlan(schedule, micro_batches=4, chunks=2 if schedule == "interleaved" else 1)
    report = verify("tests.models:gpt", "pp=2", launch="inprocess", recompute="blocks", pipeline=pipeline)
    assert report.equal, report.to_json()


def test_forward_collectives_of_a_block_are_made_again_with_it() -> None:
    plain = verify("tests.models:gpt", "tp=2", launch="inprocess", steps=1)
    again = verify("tests.models:gpt", "tp=2", launch="inprocess", steps=1, recompute="blocks")
    assert again.forward["all_reduce"].count == plain.forward["all_reduce"].count
    assert again.backward["all_reduce"].count > plain.backward["all_reduce"].count


def test_stages_keep_less() -> None:
    module, batch = models.gpt()
    kept = {}
    for policy in (Recompute.NONE, Recompute.BLOCKS):
        plan = Plan(Mesh.parse("pp=2"), recompute=policy)
        kept[policy] = sum(stage.saved_bytes for stage in tell_stages(flow_of(module, batch, plan), plan).stages)
    assert kept[Recompute.BLOCKS] < 0.6 * kept[Recompute.NONE]
