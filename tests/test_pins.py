"""Pins: placements of parameters by the user's word, from the command line or a recipe to the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.options import assignments
from paceline.errors import PlanError, RecipeError
from paceline.plan import Mesh, Pin, Plan
from paceline.program.digest import Digest
from paceline.program.sources import LoadedModules
from paceline.train.recipe import Recipe, load_recipe, to_yaml

RECIPE = """\
name: small
model: {factory: "tests.models:gpt"}
data: {source: stdlib}
mesh: dp=2,fsdp=2
train: {steps: 1, batch: 16}
"""


def test_a_pin_is_read_and_written() -> None:
    pin = Pin.parse(" blocks.[01].qkv.weight : dp=S0/3 , fsdp=S1 ")
    assert pin == Pin("blocks.[01].qkv.weight", {"dp": "S0/3", "fsdp": "S1"})
    assert Pin.parse(str(pin)) == pin


@pytest.mark.parametrize("text", ["", "a", "a:", ":dp=S0", "a:dp", "a:dp=", "a:=S0", "a:dp=S0,"])
def test_what_is_no_pin_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="such as 'blocks"):
        Pin.parse(text)


def test_an_axis_is_pinned_once_in_a_pin() -> None:
    with pytest.raises(PlanError, match="names an axis twice"):
        Pin.parse("a:dp=S0,dp=S1")


def test_an_axis_that_the_mesh_lacks_is_named_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"the axis 'fdsp', which the mesh 'dp=2,fsdp=2' .* Did you mean 'fsdp'\?"):
        Plan(Mesh.parse("dp=2,fsdp=2"), pins=(Pin.parse("*:fdsp=S0"),))


def test_pins_survive_being_stored_and_are_part_of_the_key() -> None:
    plans = [
        Plan(Mesh.parse("fsdp=2"), pins=tuple(map(Pin.parse, texts)))
        for texts in ((), ("*:fsdp=S0",), ("*:fsdp=S1",), ("*:fsdp=S0", "a:fsdp=R"), ("a:fsdp=R", "*:fsdp=S0"))
    ]
    assert [Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) for plan in plans] == plans
    keys = set()
    for plan in plans:  # as a fingerprint takes them in
        digest = Digest([], LoadedModules())
        digest.add(plan.to_dict())
        keys.add(digest.hexdigest())
    assert len(keys) == len(plans)


# In recipes and on the command line.


def load(tmp_path: Path, *overrides: str, more: str = "") -> Recipe:
    (tmp_path / "r.yaml").write_text(RECIPE + more)
    return load_recipe(tmp_path / "r.yaml", overrides)


def test_a_recipe_pins_in_either_form(tmp_path: Path) -> None:
    pins = "plan:\n  pins:\n    '*.qkv.weight': fsdp=S0/3,dp=R\n    '*.out.weight': {fsdp: S1}\n"
    recipe = load(tmp_path, more=pins)
    assert list(map(str, recipe.plan().pins)) == ["*.qkv.weight:fsdp=S0/3,dp=R", "*.out.weight:fsdp=S1"]
    (tmp_path / "again.yaml").write_text(to_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe


def test_pins_of_the_command_line_come_after_those_of_the_recipe(tmp_path: Path) -> None:
    pins = "plan: {pins: {'a.*': fsdp=S0, 'b.*': fsdp=S1}}\n"
    overrides = assignments(None, pins=["c.*:fsdp=R", "a.*:fsdp=S1", "a.*:dp=R"])
    recipe = load(tmp_path, *overrides, more=pins)
    assert list(map(str, recipe.plan().pins)) == ["b.*:fsdp=S1", "c.*:fsdp=R", "a.*:fsdp=S1,dp=R"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("plan.pins.'*.weight'=fsdp=Q0", "'Q0' is no placement"),
        ("plan.pins.'*.weight'=fsdp=P", "makes a parameter a partial sum"),
        ("plan.pins.'*.weight'=S0", "cannot read the pin '*.weight:S0'"),
        ("plan.pins.'*.weight'=fdsp=S0", "Did you mean 'fsdp'?"),
        ("plan.pins=S0", "write a placement for each pattern"),
    ],
)
def test_a_wrong_pin_of_a_recipe_is_named_with_its_place(tmp_path: Path, override: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, override)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"--set {override}: ")


def test_a_quoted_key_may_hold_dots_and_others_may_not(tmp_path: Path) -> None:
    assert load(tmp_path, 'plan.pins."a.b"=fsdp=S0').plan().pins == (Pin.parse("a.b:fsdp=S0"),)
    with pytest.raises(RecipeError, match=r"cannot read '--set plan\.pins\.'a\.b=fsdp=S0'"):
        load(tmp_path, "plan.pins.'a.b=fsdp=S0")
