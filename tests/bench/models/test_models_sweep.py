"""`paceline bench models` on a small model, its page, and the families themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.bench.families import FAMILIES, family_of
from paceline.bench.families.family import Built, Family
from paceline.bench.families.plain import graph
from paceline.bench.models import main as models
from paceline.bench.models.cells import Cell, Task, Verdict, compare
from paceline.bench.models.main import Results, Settings, main, suits
from paceline.bench.models.table import page
from paceline.errors import PlanError, RecipeError
from paceline.program.build import build
from paceline.verify.subject import batch_size
from paceline.verify.traffic import Volume

MACHINE = {"torch": "2.0", "python": "3.0"}


def test_one_run_and_one_that_goes_on_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")  # the page tells its version
    options = {"models": "graph", "dtypes": "float64", "meshes": "dp=2;sp=2;tp=2", "jobs": "1"}
    options |= {"results": str(tmp_path / "results.jsonl"), "markdown": str(tmp_path / "models.md")}
    result = json.loads(json.dumps(main(options)))
    cells = [Cell.from_json(values) for values in result["models"]]
    assert [(cell.mesh, cell.verdict) for cell in cells] == [("dp=2", Verdict.EQUAL), ("tp=2", Verdict.EQUAL)]
    assert all(cell.worst is not None and cell.worst < 1e-9 and cell.bytes > 0 for cell in cells)
    assert "| Graph network | = | = |" in (tmp_path / "models.md").read_text()
    assert result["machine"]["cores"] >= 1

    kept = (tmp_path / "results.jsonl").read_text()
    assert main(options)["models"] == result["models"]
    assert (tmp_path / "results.jsonl").read_text() == kept
    assert "2 of 2 comparisons are in" in capsys.readouterr().out


def test_what_other_code_found_is_found_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("graph", "dp=2", "float64", Verdict.EQUAL, 1e-16, "loss step 1", (("all_reduce", Volume(1, 8)),))
    file = tmp_path / "deeper" / "results.jsonl"
    Results(file).add([cell])
    assert Results(file).cells == {("graph", "float64", "dp=2"): cell}
    monkeypatch.setattr(models, "sources_hash", lambda: "changed")
    assert not Results(file).cells
    file.write_text("no JSON\n")
    with pytest.raises(RecipeError, match=r"line 1 of .* is not what this benchmark writes"):
        Results(file)


class Broken(nn.Module):
    """Cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean() * (2 if x.sum().item() > 0 else 1)


def broken() -> Built:
    return Broken(), {"x": torch.ones(4, 2)}


@pytest.mark.parametrize(
    ("factory", "mesh", "verdict", "reason"),
    [
        (broken, "dp=2", Verdict.FAILS, "the module could not be captured as a program"),
        (graph, "dp=3", Verdict.REFUSED, "a batch of 4 does not divide over 3"),
    ],
)
def test_what_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, factory: Any, mesh: str, verdict: Verdict, reason: str
) -> None:
    monkeypatch.setattr("paceline.bench.models.cells.family_of", lambda name: Family(name, name, factory))
    (cell,) = compare(Task("graph", "float64", (mesh,)))
    assert cell.verdict is verdict
    assert cell.reason.startswith(reason) and "\n" not in cell.reason


def test_a_wrong_plan_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.runtime.inprocess import InProcessExecutor

    monkeypatch.setattr(InProcessExecutor, "_reduce", lambda self, values, *_: values)
    (cell,) = compare(Task("graph", "float64", ("dp=2",)))
    assert cell.verdict is Verdict.DIFFERS
    assert cell.worst is None or cell.worst > 1e-9
    assert cell.reason.startswith("first difference: the redistribution of")


def test_the_page_tells_each_reason_once() -> None:
    pytest.importorskip("transformers")
    equal = Cell(
        "unet",
        "dp=2",
        "float64",
        Verdict.EQUAL,
        1e-16,
        "loss step 1",
        (("all_gather", Volume(2, 1000)), ("all_reduce", Volume(1, 500))),
        ("aten.histc.default",),
    )
    refused = replace(equal, mesh="hw=2", verdict=Verdict.REFUSED, worst=None, collectives=(), reason="33 | 2")
    cells = [equal, refused, replace(equal, dtype="float32"), replace(refused, dtype="float32")]
    text = page(cells, {"models": "unet", "results": "elsewhere", "jobs": "3"}, MACHINE)
    assert "    paceline bench models --set 'models=unet'\n" in text
    assert "| U-Net | = | refused |" in text
    assert text.count("- U-Net, `hw=2` in float64 and float32: refused: 33 | 2") == 1
    errors = "1.0e-16 (loss step 1) | 1.0e-16 (loss step 1)"
    assert f"| U-Net | `dp=2` | {errors} | 2 all_gather, 1 all_reduce | 1,500 | `aten.histc.default` |" in text
    assert "2 of 4\ncomparisons are equal" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt2"}, "Did you mean 'models'?"),
        ({"models": "gpt2,lama"}, "Did you mean 'llama'?"),
        ({"dtypes": "float16"}, "there is no 'float16' in dtypes"),
        ({"meshes": "dp=2;ep=2"}, "unknown mesh axis 'ep'"),
        ({"jobs": "0"}, "a whole number from 1"),
    ],
)
def test_settings_of_the_sweep_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises((RecipeError, PlanError)) as error:
        Settings.read(options)
    assert message in str(error.value)


def test_meshes_go_to_the_families_that_have_what_they_split() -> None:
    read = Settings.read({"models": "gpt2,unet,clip", "meshes": "sp=2;hw=2;dp=2, tp=2", "dtypes": "float32"})
    assert [(model, mesh) for model, _, mesh in read.wanted] == [
        ("gpt2", "sp=2"),
        ("gpt2", "dp=2,tp=2"),
        ("unet", "sp=2"),
        ("unet", "hw=2"),
        ("unet", "dp=2,tp=2"),
        ("clip", "sp=2"),
        ("clip", "hw=2"),
        ("clip", "dp=2,tp=2"),
    ]
    assert not suits(family_of("graph"), "sp=2,tp=2")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families_are_found_by_the_name_of_their_factory(family: Family) -> None:
    if family.factory.__module__.rpartition(".")[2] != "plain":
        pytest.importorskip("transformers")
    module, batch = build(family.factory_name, {}, 0)
    assert batch_size(batch) == 4
    assert family_of(family.name) is family
    assert sum(parameter.numel() for parameter in module.parameters()) < 100_000
