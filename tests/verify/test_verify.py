"""What must hold of plans: equal to serial, for every family on every mesh; and on real processes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import paceline
from paceline import shm
from paceline.errors import CaptureError, LaunchError, NonFiniteError, PlanError, RecipeError
from paceline.plan import Mesh, Plan
from paceline.verify.precision import Precision
from paceline.verify.report import Report
from paceline.verify.run import Comparison, Launch, verify
from paceline.verify.subject import Subject
from tests import models

MESHES = {
    # Without rounding to hide behind, every division: 12 samples by 2, 3 and 4.
    "float64": ("dp=2", "fsdp=2", "dp=2,fsdp=2", "dp=3", "dp=4"),
    # That the program is the module, and that rounding stays within the tolerance.
    "float32": ("dp=2,fsdp=2", "dp=3"),
}


def comparison(family: str, dtype: str, folder: Path) -> Comparison:
    """A family that is captured and trained serially once, for all that is compared with it."""
    return Comparison(Subject(f"tests.models:{family}", {}, Precision(dtype)), 2, folder)


@pytest.mark.parametrize("dtype", MESHES)
@pytest.mark.parametrize("family", [family.__name__ for family in models.FAMILIES])
def test_plans_are_equal_to_serial(family: str, dtype: str, tmp_path: Path) -> None:
    compared = comparison(family, dtype, tmp_path)
    for mesh in MESHES[dtype]:
        report = compared.report(Plan(Mesh.parse(mesh)), Launch.INPROCESS)
        assert report.equal, report.to_json()
        assert report.first is None
    if dtype == "float64":
        assert compared.located(Plan(Mesh.parse("dp=2,fsdp=2"))) is None, "located in a plan that is right"


def test_processes_agree_too() -> None:
    report = verify("tests.models:gpt", "dp=2,fsdp=2")
    assert report.equal, report.to_json()
    assert report.launch == "processes"
    assert report.backend.name == ("shm" if shm.unavailable() is None else "gloo")


def test_the_backend_is_chosen_and_told() -> None:
    report = verify("tests.models:own", "dp=3", dtype="float32", backend="gloo")
    assert report.equal, report.to_json()
    assert (report.to_json()["backend"], report.to_json()["between_ranks"]) == ("gloo", "gloo")
    console = Console(file=io.StringIO(), width=200)
    report.print(console)
    assert "between ranks: gloo\n" in console.file.getvalue()
    with pytest.raises(LaunchError, match="unknown backend 'gllo'"):
        verify("tests.models:own", "dp=2", backend="gllo")


def test_zero_stages_gather_once_or_twice(tmp_path: Path) -> None:
    compared = comparison("gpt", "float64", tmp_path)
    for zero_stage in (2, 3):
        report = compared.report(Plan(Mesh.parse("fsdp=2"), zero_stage=zero_stage), Launch.INPROCESS)
        assert report.equal
        assert report.forward["all_gather"].count > 0
        assert ("all_gather" in report.backward) is (zero_stage == 3)


@pytest.mark.parametrize(("family", "mesh"), [("gpt", "dp=2,fsdp=2"), ("gpt2", "fsdp=2"), ("own", "dp=2")])
def test_autocast(family: str, mesh: str) -> None:
    report = verify(f"tests.models:{family}", mesh, dtype="bfloat16", launch="inprocess", steps=3)
    assert report.equal, report.to_json()
    assert len(report.serial) == 3


def test_traffic_of_data_parallelism_is_each_gradient_once() -> None:
    report = verify("tests.models:gpt", "dp=2", dtype="float32", launch="inprocess", arguments={"dropout": 0.0})
    module, _ = models.gpt(dropout=0.0)
    nbytes = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert report.backward["all_reduce"].bytes == nbytes
    assert list(report.backward) == ["all_reduce"]
    assert report.forward["all_reduce"].bytes == 4 + 8  # the loss, and the number of its targets


def test_one_rank() -> None:
    report = verify(models.own, "serial", launch="inprocess")
    assert report.equal
    assert report.forward == report.backward == {}


def test_keys_of_the_json() -> None:
    values = verify(models.own, "dp=2", steps=1, launch="inprocess").to_json()
    assert (values["backend"], values["between_ranks"]) == ("none", "none: one process")
    contract = {"equal", "dtype", "tolerance", "mesh", "ranks", "steps", "loss", "worst", "eager", "collectives"}
    assert contract <= values.keys()
    assert (values["dtype"], values["tolerance"], values["mesh"], values["ranks"]) == ("float64", 1e-9, "dp=2", 2)
    assert values["loss"].keys() == {"serial", "parallel"}
    assert values["loss"]["parallel"] == pytest.approx(values["loss"]["serial"])
    assert values["worst"].keys() == {"name", "kind", "rel_error"}
    assert values["eager"]["rel_error"] < values["eager"]["tolerance"] == 1e-5
    assert set(values["worst_by_kind"]) == {"loss", "gradient", "buffer", "parameter"}
    for direction in ("forward", "backward"):
        assert values["collectives"][direction]["all_reduce"].keys() == {"count", "bytes"}
    assert values["first_difference"] is None


def test_the_room_is_a_verb() -> None:
    assert isinstance(paceline.verify(models.own, "dp=2", steps=1, launch="inprocess"), Report)


def drawn_anew() -> models.Built:
    """Other weights and samples at each call, whatever the seeds."""
    torch.seed()
    module, (x, y) = models.own()
    return module, (torch.randn_like(x), y)


def test_all_runs_start_alike_whatever_the_factory_draws() -> None:
    assert verify(drawn_anew, "dp=2", launch="inprocess").equal


class Fixed(nn.Module):
    """Fails in float64, as modules do that cast their input to a type of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.float()).mean()


class Overflowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight / 0).sum()


def fixed() -> tuple[nn.Module, Any]:
    return Fixed(), (torch.ones(4, 2),)


def overflowing() -> tuple[nn.Module, Any]:
    return Overflowing(), (torch.ones(4, 2),)


def without_batch() -> tuple[nn.Module, Any]:
    return Fixed(), ()


def without_module() -> Any:
    return torch.ones(2)


def failing() -> tuple[nn.Module, Any]:
    raise ValueError("no such file")


@pytest.mark.parametrize(
    ("factory", "options", "error", "words"),
    [
        (models.own, {"mesh": "dp=5"}, PlanError, "12"),
        (models.own, {"dtype": "float16"}, RecipeError, "float32"),
        (models.own, {"launch": "process"}, RecipeError, "processes"),
        (models.own, {"steps": 0}, RecipeError, "at least 1"),
        ("tests.models:gtp", {}, RecipeError, "gpt"),
        ("tests.models:own", {"arguments": {"width": 3}}, RecipeError, "width"),
        (failing, {}, RecipeError, "no such file"),
        (without_batch, {}, RecipeError, "batch"),
        (without_module, {}, RecipeError, "pair"),
        (fixed, {}, CaptureError, "--dtype float32"),
        (overflowing, {}, NonFiniteError, "step 1"),
        (lambda: models.own(), {"launch": "processes"}, RecipeError, "top level"),
    ],
)
def test_errors_teach(factory: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        verify(factory, **{"mesh": "dp=2", "launch": "inprocess", **options})
