"""`paceline plan`: what it says and where, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.main import app

ROOT = Path(__file__).parents[2]
GPT = ["--model", "tests.models:gpt", "--mesh"]
OWN = ["--model", "tests.models:own", "--mesh", "fsdp=2"]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_a_factory_is_told_in_short_and_in_full(tmp_path: Path) -> None:
    short, full = run(*OWN, "--json", tmp_path / "plan.json"), run(*OWN, "--explain", "--zero-stage", "2")
    assert (short.exit_code, full.exit_code) == (0, 0), short.output + full.output
    assert "kept for the backward pass" in short.output and "fsdp, elsewhere: forward" in short.output
    assert "first.weight" not in short.output
    assert "first.weight" in full.output and "what moves along fsdp" in full.output
    (plan,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert (plan["mesh"], plan["ranks"], plan["plan"]["zero_stage"], plan["optimizer"]) == ("fsdp=2", 2, 3, "AdamW")


def test_a_recipe_is_told_for_a_micro_batch_of_its_data_and_its_optimizer() -> None:
    sets = [
        "train.batch=32",
        "train.micro_batches=2",
        "optimizer.name=SGD",
        "optimizer.momentum=0.9",
        "model.args.width=8",
    ]
    arguments = [word for key in sets for word in ("--set", key)]
    pins = ["--pin", "*.weight:fsdp=R"]
    result = run(ROOT / "recipes/digits.yaml", "--mesh", "dp=2,fsdp=2", *arguments, *pins, "--json", "-")
    assert result.exit_code == 0, result.output
    (plan,) = json.loads(result.stdout)["plans"]
    assert plan["memory"]["optimizer"] == plan["memory"]["gradients"] > 0, "a momentum for each element"
    assert plan["plan"]["pins"] == ["*.weight:fsdp=R"]
    assert {held["placements"]["fsdp"] for held in plan["parameters"] if held["name"].endswith("weight")} == {"R"}
    (first, *_) = [made for made in plan["activations"] if made["operator"] == "convolution"]
    assert (first["shape"][0], first["local_shape"][0]) == (16, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a RECIPE or --model FACTORY"),
        (["a.yaml", "--model", "m.py:build"], "either a RECIPE or --model FACTORY"),
        (["--model", "m.py:build"], "name either the mesh to explain"),
        (["--model", "m.py:build", "--mesh", "dp=2", "--cluster", "laptop"], "name either the mesh to explain"),
        (["--model", "m.py:build", "--mesh", "dp=2", "--pin", "a.*"], "cannot read the pin 'a.*'"),
        ([*OWN, "--pin", "a.*:dp=S0"], "which the mesh 'fsdp=2' does not have"),
        ([*OWN, "--pin", "frist.*:fsdp=S0"], "Did you mean 'first."),
        ([*OWN, "--pin", "first.weight:fsdp=S7"], "'first.weight' is pinned to S7"),
        (["--model", "tests.models:own", "--mesh", "dp=5"], "a batch of 12 does not divide"),
        ([*OWN, "--partition"], "the mesh 'fsdp=2' has no pipeline to partition; name one, as in --mesh pp=4"),
        ([*OWN, "--bandwidth", "1"], "--bandwidth is for --partition"),
        ([*GPT, "pp=2", "--partition", "--bandwidth", "0"], "a bandwidth above zero"),
        ([*GPT, "pp=2", "--schedule", "1f2b"], "Did you mean '1f1b'"),
        ([*GPT, "pp=2", "--boundaries", "blocks.9"], "no operator of the program is called by a module 'blocks.9'"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
