"""Models that nobody wrote for pipelines, cut into stages, equal their serial modules.

Batches do not divide into the micro-batches, and micro-batches of one sample have other operators than those of two.
`paceline bench models --set 'meshes=pp=2;pp=4'` compares each with every schedule.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.families import family_of
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.verify.precision import Precision
from paceline.verify.run import Comparison, Launch
from paceline.verify.subject import Subject

CASES = {
    "tests.models:gpt": ("pp=4", "zb-h1", 5),
    "tests.models:bert": ("sp=2,pp=2", "gpipe", 5),  # labels that count: unequally many
    "gpt2": ("pp=4", "zb-v", 3),
    "t5": ("pp=4", "zb-v", 3),
    "llama": ("tp=2,pp=2", "interleaved", 3),
    "resnet": ("dp=2,pp=2", "zb-h1", 2),
    "unet": ("pp=4", "1f1b", 3),
}


@pytest.mark.parametrize("model", CASES)
def test_stages_equal_the_module(model: str, tmp_path: Path) -> None:
    if ":" not in model:
        pytest.importorskip("transformers")
    factory = model if ":" in model else family_of(model).factory
    mesh, schedule, micro_batches = CASES[model]
    flow = PipelinePlan(schedule, micro_batches, 2 if schedule == "interleaved" else 1)
    comparison = Comparison(Subject(factory, {}, Precision.FLOAT64), 1, tmp_path)
    report = comparison.report(Plan(Mesh.parse(mesh), pipeline=flow), Launch.INPROCESS)
    assert report.equal, report.to_json()
    assert report.pipeline is not None and report.pipeline.micro_batches == micro_batches


def test_in_float32_and_under_autocast(tmp_path: Path) -> None:
    plan = Plan(Mesh.parse("pp=2"), pipeline=PipelinePlan("zb-v", 3))
    for precision in (Precision.FLOAT32, Precision.BFLOAT16):
        comparison = Comparison(Subject("tests.models:own", {}, precision), 1, tmp_path)
        assert comparison.report(plan, Launch.INPROCESS).equal


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_what_is_rounded_on_the_way_is_reported_so(wire: str, tmp_path: Path) -> None:
    comparison = Comparison(Subject("tests.models:own", {}, Precision.FLOAT64), 1, tmp_path)
    report = comparison.report(Plan(Mesh.parse("pp=2"), pipeline=PipelinePlan(wire=wire)), Launch.INPROCESS)
    assert not report.equal and report.program_equal
    assert report.first is None, "no operator is wrong"
    assert str(report.pipeline) == f"schedule 1f1b: 4 micro-batches, sent as {wire}: rounded, so not equal to serial"
    assert report.to_json()["pipeline"]["wire"] == wire
