"""Faults made on purpose are found, and located."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.placement.placements import REPLICATE
from paceline.placement.rules import AxisRule
from paceline.placement.rules import rule as rules
from paceline.program.capture import capture
from paceline.program.program import Program
from paceline.runtime.inprocess import InProcessExecutor
from paceline.verify import run
from paceline.verify.report import Report
from paceline.verify.run import verify
from tests import models

# Batch norm with the statistics of each rank's own samples: its sums are not added over ranks.
LOCAL_STATISTICS = (
    torch.ops.paceline.batch_norm_sums.default,
    AxisRule((("n", "c"), ("c",)), ((None, "c"),), frozenset("n"), results={("n", 0): REPLICATE}),
)
# Weight gradients that are not added over ranks.
NOT_REDUCED = (
    torch.ops.aten.mm.default,
    AxisRule((("i", "k"), ("k", "j")), (("i", "j"),), frozenset("ik"), results={("k", 0): REPLICATE}),
)


def _replace(monkeypatch: pytest.MonkeyPatch, fault: tuple[Any, AxisRule]) -> None:
    target, wrong = fault
    monkeypatch.setitem(rules._RULES, target, lambda call: wrong)


def _printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=200, record=True)
    report.print(console)
    return console.export_text()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_wrong_rule_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    _replace(monkeypatch, LOCAL_STATISTICS)
    report = verify(models.own, "dp=2", dtype=dtype, launch="inprocess")
    assert not report.equal
    assert report.program_equal
    assert report.first is not None
    assert (report.first.operator, report.first.module) == ("paceline.batch_norm_sums.default", "norm")
    assert (report.first.backward, report.first.redistributed) == (False, False)
    assert report.first.placements == (("dp", "R"),)
    assert report.to_json()["first_difference"]["placements"] == {"dp": "R"}
    text = _printed(report)
    assert "NOT EQUAL" in text
    assert "batch_norm_sums.default in 'norm' (forward pass" in text


def test_a_wrong_rule_of_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace(monkeypatch, NOT_REDUCED)
    report = verify(models.own, "dp=2", launch="inprocess")
    worst = report.differences[0]
    assert (worst.kind.value, worst.name) in {("gradient", "first.weight"), ("gradient", "last.weight")}
    assert report.first is not None
    assert (report.first.operator, report.first.module) == ("aten.mm.default", "last")
    assert report.first.backward


def test_a_wrong_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessExecutor, "_reduce", lambda self, values, axis: values)
    report = verify(models.own, "dp=2", launch="inprocess")
    assert not report.equal
    assert report.first is not None
    assert report.first.redistributed
    assert str(report.first).startswith("the redistribution of paceline.batch_norm_sums.default in 'norm'")


def test_a_fault_that_does_not_show_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = InProcessExecutor._reduce

    def wrong(self: InProcessExecutor, values: list[Tensor], axis: str) -> list[Tensor]:
        return values if self._observe is None else reduce(self, values, axis)

    monkeypatch.setattr(InProcessExecutor, "_reduce", wrong)
    report = verify(models.own, "dp=2", launch="inprocess")
    assert not report.equal
    assert report.first is None
    assert "comes from the processes themselves or from rounding" in _printed(report)


def test_a_replica_that_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 alone gets a wrong sum: what rank 0 holds is right."""
    reduce = InProcessExecutor._reduce

    def wrong(self: InProcessExecutor, values: list[Tensor], axis: str) -> list[Tensor]:
        return [value * (1 + 1e-6 * rank) for rank, value in enumerate(reduce(self, values, axis))]

    monkeypatch.setattr(InProcessExecutor, "_reduce", wrong)
    assert not verify(models.own, "dp=2", launch="inprocess").equal


def test_a_program_that_is_not_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: nn.Module, batch: Any, **options: Any) -> Program:
        program = capture(module, batch, **options)
        relu = next(node for node in program.graph.nodes if node.target is torch.ops.aten.relu.default)
        relu.target = torch.ops.aten.sigmoid.default
        return program

    monkeypatch.setattr(run, "capture", wrong)
    report = verify(models.own, "dp=2", launch="inprocess")
    assert report.plan_equal
    assert not report.equal
    assert "the captured program is not the module" in _printed(report)


def test_exit_codes_and_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def invoke(model: str, *options: str) -> int:
        command = ["verify", "--model", model, "--launch", "inprocess", *options]
        return CliRunner().invoke(app, [*command, "--mesh", "dp=2"]).exit_code

    file = tmp_path / "report.json"
    assert invoke("tests.models:own", "--json", str(file)) == 0
    assert json.loads(file.read_text())["equal"] is True
    assert invoke("tests.models:nothing") == 2

    _replace(monkeypatch, NOT_REDUCED)
    assert invoke("tests.models:own", "--json", str(file)) == 1
    values = json.loads(file.read_text())
    assert values["equal"] is False
    assert values["first_difference"]["operator"] == "aten.mm.default"
