"""Training by a plan from a file: what it says, as assignments over a recipe."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from paceline.errors import RecipeError
from paceline.planner.plan_file import PlanFile, read_plan_file
from paceline.train.recipe import Recipe


def assignments_of(path: Path) -> list[str]:
    """Return what a plan file sets in a recipe: mesh, the whole section `plan`, and how a step is cut.

    Raises:
        PlanError: the file cannot be read, or holds no plan.
    """
    file = read_plan_file(path)
    plan = file.plan.to_dict()
    mesh = plan.pop("mesh")
    plan["pins"] = {pin.pattern: pin.where for pin in file.plan.pins}
    plan["pipeline"] = {key: value for key, value in asdict(file.plan.pipeline).items() if key != "micro_batches"}
    return [
        f"mesh={mesh}",
        f"plan={json.dumps(plan)}",
        f"train.micro_batches={file.micro_batches}",
        "compile=null",  # it would win over what the plan says
    ]


def check_batch(recipe: Recipe, path: Path) -> None:
    """Hold a recipe to the step that a plan is for.

    Raises:
        RecipeError: it trains on batches of another size.
    """
    file: PlanFile = read_plan_file(path)
    if recipe.train.batch != file.batch:
        raise RecipeError(
            f"{path} plans steps of {file.batch} samples, and the recipe trains on batches of {recipe.train.batch}. "
            f"Plan again for that (paceline plan RECIPE --cluster NAME), or add --set train.batch={file.batch}."
        )
