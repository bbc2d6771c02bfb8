"""`paceline plan` for pipelines: stages, what they send, and PipeDream's partition."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.plan import Plan
from paceline.schedule import make
from tests.models import gpt

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/pipelines.md").read_text(encoding="utf-8")
GPT = ["--model", "tests.models:gpt", "--mesh"]


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result


def documented(title: str) -> set[str]:
    """The keys in the table below a line of docs/pipelines.md."""
    table = PAGE.partition(title)[2].partition("\n\n")[2].partition("\n\n")[0]
    return {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_stages_are_told_for_a_placed_micro_batch() -> None:
    (plan,) = json.loads(run(*GPT, "dp=2,pp=2", "--micro-batches", "2", "--json", "-").stdout)["plans"]
    assert (plan["mesh"], plan["ranks"], [stage["ranks"] for stage in plan["stages"]]) == ("dp=2,pp=2", 4, [[0], [1]])
    names = [name for stage in plan["stages"] for name in stage["parameters"]]
    assert set(names) == {name for name, _ in gpt()[0].named_parameters()}
    assert sum(stage["parameter_bytes"] for stage in plan["stages"]) == sum(
        dict(gpt()[0].named_parameters())[name].nbytes for name in names
    )
    (forward, *_) = [sent for sent in plan["sent"] if sent["pass"] == "forward"]
    assert (forward["from"], forward["to"]) == (0, 1) and forward["module"].startswith("blocks")
    schedule = make("1f1b", 2, 2)
    assert (plan["schedule"]["name"], plan["schedule"]["micro_batches"]) == (schedule.name, 2)
    assert plan["schedule"]["in_flight"] == [2, 1] and 0 < plan["schedule"]["bubble"] < 1
    assert set(plan) == documented("An object of `plans` has")
    assert set(plan["stages"][0]) == documented("each of `stages`")


def test_tables_of_stages() -> None:
    short, full = (run(*GPT, "pp=2", "--boundaries", "blocks.1", *more).output for more in ([], ["--explain"]))
    assert "blocks.1" in short and "2 stages on 2 of them" in short and "bubble" in short
    assert full.count("float32") >= short.count("float32") > 0
    again = run(*GPT, "pp=2", "--schedule", "zb-h1", "--micro-batches", "4").output
    assert "schedule zb-h1" in again and "4 micro-batches take" in again


def test_micro_batches_of_a_recipe_are_its_own() -> None:
    sets = ["--set", "train.batch=32", "--set", "model.args.width=8"]
    result = run(ROOT / "recipes/digits.yaml", "--mesh", "pp=2", *sets, "--micro-batches", "4", "--json", "-")
    (plan,) = json.loads(result.stdout)["plans"]
    assert plan["schedule"]["micro_batches"] == 4
    assert {sent["shape"][0] for sent in plan["sent"] if len(sent["shape"]) > 1} == {8}


def test_a_partition_is_told_with_the_lines_for_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    text = run(*GPT, "pp=3", "--partition", "--bandwidth", "0.02", "--json", file).output
    found = json.loads(file.read_text())["partition"]
    assert (found["mesh"], found["bandwidth"]) == ("pp=3", 0.02e9)
    assert sum(found["replicas"]) == 3 and len(found["boundaries"]) + 1 == len(found["stages"]) > 1
    assert found["seconds"] <= min(found["data_seconds"], found["pipeline_seconds"])
    recipe = yaml.safe_load(text.partition("for the recipe\n")[2])
    flow = Plan.from_dict({"mesh": recipe["mesh"], **recipe["plan"]}).pipeline
    assert list(flow.boundaries) == found["boundaries"]
    assert flow.replicas in ((), tuple(found["replicas"]))
    run(*GPT, "pp=3", "--boundaries", ",".join(flow.boundaries), "--schedule", flow.schedule)
    assert set(found) == documented("The object `partition` has")


def test_one_stage_on_all_ranks_is_called_what_it_is() -> None:
    text = run(*GPT, "pp=3", "--partition", "--bandwidth", "1000").output
    assert "replicas: [3]" in text and "'dp=3' does the same without a pipeline" in text
