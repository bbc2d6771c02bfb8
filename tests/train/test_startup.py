"""What a finished run says one may do next."""

from pathlib import Path

import pytest

from paceline.train.callbacks import EndReport
from paceline.train.recipe import Recipe
from paceline.train.rundir import RunDirectory
from paceline.train.startup import next_steps, train_longer


@pytest.mark.parametrize(
    ("mesh", "batch", "suggested"),
    [("serial", 8, "fsdp=2"), ("dp=4", 8, "fsdp=4"), ("tp=4", 6, "fsdp=2"), ("tp=2", 3, None)],
)
def test_the_other_mesh_is_one_that_the_batch_divides_over(mesh: str, batch: int, suggested: str | None) -> None:
    values = {
        "name": "small",
        "model": {"factory": "package:build"},
        "data": {"source": "stdlib"},
        "mesh": mesh,
        "train": {"steps": 1, "batch": batch},
    }
    recipe = Recipe.model_validate(values)
    said = next_steps(recipe, RunDirectory(Path("runs")), EndReport(1, 1, None, 1.0), tensorboard=False, placed=True)
    assert f"paceline verify runs/config.yaml --mesh {mesh}" in said
    assert "--resume --set train.steps=2\n" in said
    lines = [line for line in said.splitlines() if "on another mesh" in line]
    assert [line.split("--mesh ")[1] for line in lines] == ([suggested] if suggested else [])
    if suggested:
        Recipe.model_validate({**values, "mesh": suggested})


def test_a_run_of_epochs_goes_on_by_epochs() -> None:
    train = {"epochs": 3, "batch": 4}
    recipe = Recipe.model_validate(
        {"name": "small", "model": {"factory": "package:build"}, "data": {"source": "stdlib"}, "train": train}
    )
    said = train_longer(recipe, RunDirectory(Path("my runs")), EndReport(30, 30, None, 1.0))
    assert said.endswith("paceline train 'my runs/config.yaml' --out 'my runs' --resume --set train.epochs=6")
