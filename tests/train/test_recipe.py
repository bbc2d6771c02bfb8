"""Recipes: what is accepted, and that each fault is named with its line, what is allowed and the nearest known word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import RecipeError
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.train.recipe import Recipe, load_recipe, to_yaml

ROOT = Path(__file__).parents[2]
MINIMAL = """\
name: small
model:
  factory: model.py:build
data: {source: stdlib}
train:
  steps: 100
  batch: 16
"""
Load = Callable[..., Recipe]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    (tmp_path / "model.py").write_text("def build(): ...\n")

    def load_text(*overrides: str, text: str = MINIMAL) -> Recipe:
        path = tmp_path / "r.yaml"
        path.write_text(text)
        return load_recipe(path, overrides)

    return load_text


def refusal(load: Load, *overrides: str, text: str = MINIMAL) -> str:
    with pytest.raises(RecipeError) as caught:
        load(*overrides, text=text)
    return str(caught.value)


def test_files_become_absolute_and_defaults_are_filled_in(load: Load, tmp_path: Path) -> None:
    recipe = load()
    assert recipe.model.factory == f"{tmp_path / 'model.py'}:build"
    assert recipe.plan() == Plan(pipeline=PipelinePlan(micro_batches=1))  # of the loader's micro-batches
    assert recipe.optimizer.options == {"lr": 1e-3}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    load_recipe(path)


def test_overrides_apply_in_order_over_the_file(load: Load) -> None:
    recipe = load("train.batch=8", "mesh=dp=2", "train.batch=4", "optimizer.lr=2e-4", "checkpoint.keep=5")
    assert (recipe.train.batch, recipe.mesh, recipe.optimizer.lr) == (4, Mesh.parse("dp=2"), 2e-4)
    assert recipe.checkpoint.keep == 5


def test_compile_is_a_short_way_to_write_plan_compile(load: Load) -> None:
    assert load("compile=true").plan().compile
    assert load("plan.compile=true").plan().compile
    assert not load("plan.compile=true", "compile=false").plan().compile


def test_what_is_written_out_reads_back_as_the_same_recipe_from_anywhere(load: Load, tmp_path: Path) -> None:
    recipe = load(
        "mesh=dp=2,fsdp=2",
        "plan.zero_stage=2",
        "optimizer={name: AdamW, lr: 1e-3, betas: [0.9, 0.95], eps: 1e-8}",
        "schedule={name: StepLR, step_size: 10}",
        "train.validate={every: 10}",
        "sample={factory: 'model.py:build', prompt: 'déf '}",
        "callbacks=['model.py:build']",
    )
    copy = tmp_path / "elsewhere" / "config.yaml"
    copy.parent.mkdir()
    copy.write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe(copy) == recipe


def test_a_number_like_1e_3_is_a_number_wherever_it_stands(load: Load) -> None:
    assert load("optimizer.eps=1e-8").optimizer.options["eps"] == 1e-8
    assert load("model.args={scale: 2E+3, name: e3}").model.args == {"scale": 2000.0, "name": "e3"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trian: 1", "r.yaml, line 8: unknown key 'trian'. Did you mean 'train'? Known sections: name, model, "),
        ("precision: float31", "line 8: 'precision' must be 'float32', 'bfloat16' or 'float64', not 'float31'."),
        ("mesh: dp=2,tpp=2", "line 8: unknown mesh axis 'tpp'"),
        ("optimizer: {lrr: 1}", "line 8: AdamW has no option 'lrr'"),
        ("optimizer: {eps: small}", "line 8: torch.optim.AdamW refuses its options"),
        ("schedule: {name: cosin}", "Did you mean 'cosine'?"),
        ("checkpoint:\n  evry: 5", "line 9: unknown key 'checkpoint.evry'. Did you mean 'every'?"),
        ("callbacks:\n  - model.py:A\n  - modle.py:B", "line 10: 'modle.py:B': there is no file"),
        ("train: {}", "line 8: the key 'train' is given twice, first in"),
        ("seed: [", "not valid YAML"),
        ("device: &a [*a]", "does an anchor contain itself?"),
    ],
)
def test_a_fault_of_the_file_is_named_by_its_line(load: Load, line: str, expected: str) -> None:
    assert expected in refusal(load, text=MINIMAL + line + "\n")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.stpes=1", "--set train.stpes=1: unknown key 'train.stpes'. Did you mean 'steps'?"),
        ("train.steps=many", "'train.steps' must be a whole number, not 'many'."),
        ("train.batch=true", "'train.batch' must be a whole number, not True."),
        ("train.batch=0", "'train.batch' must be greater than or equal to 1, not 0."),
        ("train.epochs=2", "both given"),
        ("train.steps=null", "'train.steps' or 'train.epochs' is missing"),
        ("train.micro_batches=3", "which 3 micro-batches do not divide; these would: 1, 2, 4, 8, 16."),
        ("mesh=dp=3", "Parts that would: 1, 2, 4, 8, 16; batches that would: 15, 18."),
        ("mesh='tp=2,dp=3'", "into 3 parts, which do not divide the 16 samples of a micro-batch"),
        ("data.source=stdlb", "'data.source' is 'stdlb'; known: stdlib, text, "),
        ("data.sequnce=3", "unknown key 'data.sequnce'. Did you mean 'sequence'?"),
        ("data={}", "the key 'data.source' is missing; known: "),
        ("name.x=1", "'name' is the value 'small', not a section with keys."),
        ("name=a/b", "'name' "),
        ("steps", "cannot read '--set steps'"),
        ("train.batch=[", "the value is not YAML"),
        ("optimizer.name=LBFGS", "--set optimizer.name=LBFGS: optimizer 'LBFGS' cannot be used"),
        ("schedule={name: StepLR}", "step_size"),
        ("schedule.warmup=1000", "schedule.warmup is 1000 steps in a run of 100"),
        ("model.factory=model", "write 'package.module:callable' or 'path/to/file.py:callable'"),
        ("plan.zero_stage=1", "'plan.zero_stage' must be 2 or 3, not 1."),
    ],
)
def test_a_fault_of_an_override_is_named_by_the_override(load: Load, override: str, expected: str) -> None:
    message = refusal(load, override)
    assert expected in message
    assert f"--set {override}" in message


@pytest.mark.parametrize("mesh", ["tp=3", "dp=2,sp=3", "hw=5,fsdp=4"])
def test_only_axes_that_split_the_batch_must_divide_it(load: Load, mesh: str) -> None:
    assert str(load(f"mesh={mesh}").mesh) == mesh


def test_all_faults_are_told_at_once(load: Load) -> None:
    message = refusal(load, "seed=-1", "device=tpu", text=MINIMAL.replace("name: small\n", ""))
    assert len(message.splitlines()) == 3
    assert "the key 'name' is missing." in message


@pytest.mark.parametrize("text", ["- 1\n", "just words\n"])
def test_a_document_that_is_no_mapping_is_refused(load: Load, text: str) -> None:
    assert "a recipe is a mapping of sections" in refusal(load, text=text)


def test_an_empty_recipe_names_what_is_missing(load: Load) -> None:
    assert [line.split("'")[1] for line in refusal(load, text="").splitlines()] == ["name", "model", "data", "train"]


def test_a_missing_recipe_names_its_neighbours(load: Load, tmp_path: Path) -> None:
    load()
    with pytest.raises(RecipeError, match=r"recipes there: r\.yaml\. Did you mean 'r\.yaml'\?"):
        load_recipe(tmp_path / "rr.yaml")
