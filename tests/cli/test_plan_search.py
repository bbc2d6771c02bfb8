"""`paceline plan --cluster` and `paceline train --plan`: what is found is what runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.plan import Plan

ROOT = Path(__file__).parents[2]
TINY = ["model.args.width=32", "model.args.layers=4", "model.args.context=16", "data.sequence=16"]
SHORT = ["train.steps=2", "schedule.warmup=1", "train.validate=null", "sample=null", "data.validation=0"]
GPT = [str(ROOT / "recipes/gpt-stdlib.yaml"), *(word for key in TINY for word in ("--set", key))]
CHEAP = [word for key in SHORT for word in ("--set", key)]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_best_plan_of_a_search_trains_as_it_is(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "run"
    searched = run("plan", *GPT, "--cluster", "laptop", "--axes", "pp,dp", "--json", tmp_path / "s.json", "-o", plan)
    assert searched.exit_code == 0, searched.output
    assert "why not" in searched.output and "each strategy by itself on 4 devices" in searched.output
    found = json.loads((tmp_path / "s.json").read_text())
    written = yaml.safe_load(plan.read_text())
    assert written["plan"]["mesh"] == found["plans"][0]["mesh"]
    assert written["expected"]["step_s"] == found["plans"][0]["step_s"]
    written["plan"] |= {"mesh": "pp=2,dp=2", "recompute": "blocks"}  # whatever is best here: stages, and recomputation
    written["plan"]["pipeline"]["schedule"] = "zb-h1"
    plan.write_text(yaml.safe_dump(written | {"micro_batches": 2}))
    trained = run("train", *GPT, *CHEAP, "--plan", plan, "--launch", "inprocess", "--out", out)
    assert trained.exit_code == 0, trained.output
    executed = yaml.safe_load((out / "plan.yaml").read_text())
    given = Plan.from_dict(written["plan"])
    ran = Plan.from_dict(executed["plan"])
    assert ran.with_(pipeline=given.pipeline) == given
    assert (ran.pipeline.schedule, executed["micro_batches"], executed["batch"]) == ("zb-h1", 2, 8)
    again = run(
        "train", *GPT, *CHEAP, "--plan", out / "plan.yaml", "--launch", "inprocess", "--out", tmp_path / "again"
    )
    assert again.exit_code == 0, again.output
    assert yaml.safe_load((tmp_path / "again/plan.yaml").read_text()) == executed


def test_nothing_fits_ends_with_one_and_says_what_would() -> None:
    result = run("plan", *GPT, "--cluster", "laptop", "--memory-bytes", "200000")
    assert result.exit_code == 1
    words = " ".join(result.output.split())
    assert "nothing fits" in words and "too many, with" in words and "would fit: " in words
    assert "DDP (replicas), dp=4: does not fit: " in words


def test_a_factory_is_searched_for_any_batch_and_number_of_devices() -> None:
    result = run(
        "plan",
        "--model",
        "tests.models:gpt",
        "--cluster",
        "dgx-a100",
        "--devices",
        "12",
        "--batch",
        "36",
        "--json",
        "-",
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{") :])
    assert (found["devices"], found["batch"], found["workload"]) == (12, 36, "gpt")
    assert {plan["ranks"] for plan in found["plans"]} == {12}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "dgx-a10"], "Did you mean 'dgx-a100'"),
        (["--cluster", "laptop", "--devices", "17"], "cluster 'laptop' has 1 to 16 devices, not 17"),
        (["--cluster", "laptop", "--axes", "dp,ddp"], "the search has no axis 'ddp'"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments: list[str], words: str) -> None:
    result = run("plan", "--model", "tests.models:own", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_a_plan_for_another_batch_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("{plan: {mesh: dp=2}, batch: 16, micro_batches: 1}")
    result = run("train", *GPT, "--plan", plan, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "plans steps of 16 samples, and the recipe trains on batches of 8" in " ".join(result.output.split())


def test_options_win_over_the_plan(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "run"
    plan.write_text("{plan: {mesh: dp=2, zero_stage: 2, compile: true}, batch: 8, micro_batches: 2}")
    options = ["--mesh", "serial", "--set", "plan.compile=false"]
    result = run("train", *GPT, *CHEAP, "--plan", plan, *options, "--out", out)
    assert result.exit_code == 0, result.output
    executed = yaml.safe_load((out / "plan.yaml").read_text())
    assert (executed["plan"]["mesh"], executed["plan"]["compile"]) == ("serial", False)
    assert (executed["plan"]["zero_stage"], executed["micro_batches"]) == (2, 2)
