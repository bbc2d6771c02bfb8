"""Plans as files: read back as they were written, and refused where they are not plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline.plan import Mesh, Pin, PipelinePlan, Plan, Recompute
from paceline.planner.plan_file import PlanFile, read_plan_file

PLAN = Plan(
    Mesh.parse("pp=2,dp=3"),
    zero_stage=2,
    compile=True,
    pins=(Pin.parse("*.weight:dp=R"),),
    memory_bytes=10**9,
    recompute=Recompute.BLOCKS,
    pipeline=PipelinePlan("interleaved", 4, 2, boundaries=("blocks.1", "blocks.2", "blocks.3"), recompute=(1,)),
)


def test_a_plan_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PlanFile(PLAN, 24, 4).to_yaml({"expected": {"step_s": 1.5}}))
    assert read_plan_file(path) == PlanFile(PLAN, 24, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plna: {}", "unknown key 'plna'.*Did you mean 'plan'"),
        ("plan: {}", "has no 'batch'"),
        ("{plan: {mseh: dp=2}, batch: 2, micro_batches: 1}", "unknown plan key 'mseh'.*Did you mean 'mesh'"),
        ("{plan: {mesh: dp=0}, batch: 2, micro_batches: 1}", "mesh axis 'dp' has size 0"),
        ("{plan: {recompute: all}, batch: 2, micro_batches: 1}", "recompute is 'all'; it is one of none"),
        ("{plan: {pipeline: {chunk: 2}}, batch: 2, micro_batches: 1}", "unknown pipeline key 'chunk'"),
        ("{plan: {zero_stage: two}, batch: 2, micro_batches: 1}", "zero_stage is two"),
        ("{plan: {bucket_bytes: many}, batch: 2, micro_batches: 1}", "a value of a wrong kind"),
        ("{plan: dp=2, batch: 2, micro_batches: 1}", "'plan' is 'dp=2'; it is a section"),
        ("{plan: {}, batch: true, micro_batches: 1}", "'batch' is True; it is a whole number from 1"),
        ("{plan: {}, batch: 2, micro_batches: 0}", "'micro_batches' is 0"),
        ("[1, 2]", "plan.yaml holds a list"),
        ("{", "not valid YAML"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=words):
        read_plan_file(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("plan: {}")
    with pytest.raises(PlanError, match=r"there is no plan .*plna.yaml"):
        read_plan_file(tmp_path / "plna.yaml")
