"""A run ends with what its steps were predicted to take beside what they took, or says why there is no prediction."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from paceline.plan import Mesh, Plan
from paceline.runtime.module import parallelize
from paceline.runtime.operator_times import OperatorFile
from paceline.simulator.placed.measured import handed_bytes
from paceline.simulator.placed.step import Circumstances
from paceline.train.callbacks import EndReport, StepReport
from paceline.train.prediction import (
    Prediction,
    PredictionTable,
    compared,
    prediction_of,
    table_of,
    why_not,
)
from paceline.train.step_memory import StepMemory
from tests.ranks import ranks

CPU = torch.device("cpu")
PREDICTION = Prediction(
    step_s=0.1,
    parts={"forward": 0.04, "backward": 0.05, "update": 0.01},
    exchange_s={"dp": 0.002},
    memory_bytes=3 << 20,
    peak_at="backward blocks.1 mm",
    handed_bytes={"dp": 1 << 20},
    missing=0,
)


class Net(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.second(self.first(x).relu()), y)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    parameters = list(module.parameters())  # a stage may have none
    return torch.optim.SGD(parameters or [nn.Parameter(torch.zeros(1))], lr=0.1)


def batch(size: int = 4) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 8), "y": torch.randint(4, (size,))}


def report(step: int, seconds: float, **parts: float) -> StepReport:
    return StepReport(step, 9, 1.0, 0.1, 1.0, 4.0, seconds, 0, parts)


def steps(**parts: float) -> list[StepReport]:
    return [report(step, 0.2, **parts) for step in range(3)]


def shown(console: Console) -> str:
    file: Any = console.file
    return str(file.getvalue())


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_parts_are_compared_and_the_one_that_differs_most_is_named() -> None:
    found = compared(PREDICTION, steps(data=0.01, forward=0.05, backward=0.12, update=0.02), 4 << 20, {"dp": 1 << 20})
    assert found["step_s"] == {"predicted": 0.1, "measured": 0.2}
    assert found["parts"]["backward"] == {"predicted": 0.05, "measured": 0.12}
    assert found["differs_most"] == "backward, 70.0 ms less than it took"
    assert found["memory_bytes"] == {"predicted": 3 << 20, "measured": 4 << 20}
    assert found["handed_bytes"] == {"dp": {"predicted": 1 << 20, "measured": 1 << 20}}


def test_passes_that_cannot_be_told_apart_are_compared_together() -> None:
    found = compared(PREDICTION, steps(passes=0.15, update=0.02), None, {})
    assert found["parts"]["passes"] == {"predicted": pytest.approx(0.1), "measured": 0.15}
    assert found["parts"]["forward"] == {"predicted": 0.04, "measured": None}
    assert found["memory_bytes"]["measured"] is None and found["handed_bytes"]["dp"]["measured"] is None


def test_the_table_has_a_row_for_each_part(console: Console) -> None:
    console.print(table_of(compared(PREDICTION, steps(forward=0.05, backward=0.06, update=0.02), 4 << 20, {})))
    text = shown(console)
    for words in ("100.0 ms", "200.0 ms", "-50.0%", "of which waiting along dp", "3.0 MiB", "4.0 MiB", "-25.0%"):
        assert words in text


def test_a_run_is_compared_at_its_end(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    module = parallelize(Net(), batch(), Plan(Mesh()))
    prediction, reason = prediction_of(module, batch(), Circumstances())
    assert reason is None and prediction is not None
    assert prediction.step_s >= sum(prediction.parts.values()) * 0.999 and prediction.memory_bytes > 0
    assert OperatorFile(tmp_path / "cache").load(CPU, 1)
    assert handed_bytes(module, batch(), 1) == {}
    file = tmp_path / "prediction.json"
    callback = PredictionTable(prediction, None, module, optimizer_of(module), {}, file, console)
    for step in steps(forward=0.05, backward=0.06, update=0.02):
        callback.on_step(step)
    callback.on_end(EndReport(3, 3, None, 1.0))
    assert json.loads(file.read_text())["step_s"]["measured"] == 0.2
    assert "largest difference" in shown(console)


def test_memory_is_looked_at_in_steps_that_follow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    module = parallelize(Net(), batch(), Plan(Mesh()))
    held = sum(parameter.nbytes for parameter in module.parameters())
    peak = iter([1500 + held, 9000])
    monkeypatch.setattr("paceline.train.step_memory.can_take_memory", lambda: True)
    monkeypatch.setattr("paceline.train.step_memory.memory_bytes", lambda: 1000 + held)
    monkeypatch.setattr("paceline.train.step_memory.peak_bytes", lambda: next(peak))
    monkeypatch.setattr("paceline.train.step_memory.forget_peak", lambda: None)
    memory = StepMemory(module, optimizer_of(module))
    memory.after_step()
    memory.after_step()
    memory.begin_anew()  # a validation: the next peak is not of a step
    memory.after_step()
    assert memory.most() == held + 500
    monkeypatch.setattr("paceline.train.step_memory.can_take_memory", lambda: False)
    untold = StepMemory(module, optimizer_of(module))
    untold.after_step()
    assert untold.most() is None


def test_a_second_prediction_times_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    module = parallelize(Net(), batch(), Plan(Mesh()))
    first, _ = prediction_of(module, batch(), Circumstances())
    monkeypatch.setattr("paceline.runtime.exemplars.Exemplars.round", lambda *_, **__: pytest.fail("it was timed"))
    second, _ = prediction_of(module, batch(), Circumstances())
    assert first is not None and second is not None
    assert second.step_s == pytest.approx(first.step_s, rel=1e-2)


def test_why_there_is_no_prediction_is_said(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "off")
    module = parallelize(Net(), batch(), Plan(Mesh()))
    prediction, reason = prediction_of(module, batch(), Circumstances())
    assert prediction is None and reason is not None and "PACELINE_CACHE is off" in reason
    callback = PredictionTable(None, reason, module, optimizer_of(module), {}, tmp_path / "prediction.json", console)
    callback.on_step(report(1, 0.1))
    callback.on_end(EndReport(1, 1, None, 1.0))
    assert "no prediction of a step: PACELINE_CACHE is off" in shown(console)
    assert not (tmp_path / "prediction.json").exists()
    together = parallelize(Net(), batch(), Plan(Mesh.parse("dp=2")), devices=[CPU])
    assert why_not(together) == "all ranks share one process"


def test_no_run_ends_for_want_of_a_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    module = parallelize(Net(), batch(), Plan(Mesh()))

    def fails(*_: Any) -> None:
        raise KeyError("something")

    monkeypatch.setattr("paceline.train.prediction.simulated", fails)
    prediction, reason = prediction_of(module, batch(), Circumstances())
    assert prediction is None and reason == "KeyError: 'something'"


@ranks(2)
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_ranks_predict_together(rank: int, mesh: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path))
        module = parallelize(Net(), batch(), Plan(Mesh.parse(mesh)))
        prediction, reason = prediction_of(module, batch(), Circumstances(micro_batches=2))
        assert reason is None and (prediction is not None) == (rank == 0)
        callback = PredictionTable(prediction, reason, module, optimizer_of(module), {}, None, Console(quiet=True))
        for step in steps():
            callback.on_step(step)
        callback.on_end(EndReport(3, 3, None, 1.0))
        if prediction is not None:
            assert prediction.step_s > 0 and prediction.memory_bytes > 0
            assert set(prediction.exchange_s) <= {"dp", "pp"}


@ranks(2)
@pytest.mark.parametrize("what", ["graphs_of", "simulated"])
@pytest.mark.parametrize("unlucky", [0, 1])
def test_where_one_rank_cannot_tell_all_go_without(rank: int, what: str, unlucky: int, tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("something")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path))
        module = parallelize(Net(), batch(), Plan(Mesh.parse("dp=2")))
        if rank == unlucky:
            patch.setattr(f"paceline.train.prediction.{what}", fails)
        prediction, reason = prediction_of(module, batch(), Circumstances())
        if what == "simulated" and unlucky == 1:  # which only rank 0 does
            assert reason is None
        else:
            assert prediction is None and reason is not None
            assert ("something" in reason) == (rank == unlucky)
        callback = PredictionTable(prediction, reason, module, optimizer_of(module), {}, None, Console(quiet=True))
        for step in steps():
            callback.on_step(step)
        callback.on_end(EndReport(3, 3, None, 1.0))  # nobody is waited for
