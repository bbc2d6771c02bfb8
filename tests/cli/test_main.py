"""The command line: help, exit codes and messages. What the verbs do is tested where it is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline import __version__
from paceline.cli.main import app

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_version() -> None:
    assert run("--version").output == f"paceline {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["train", "verify", "bench", "dp=2", "fsdp", "package.module:callable", "Exit codes"]),
        (["train"], ["RECIPE", "--mesh", "--set", "--resume", "--out", "--launch", "--backend", "torchrun"]),
        (["verify"], ["RECIPE", "--model", "--mesh", "--steps", "--dtype", "--pin", "--backend", "--json"]),
        (["plan"], ["RECIPE", "--model", "--mesh", "--explain", "--pin", "--json"]),
        (["bench"], ["NAME", "--json", "data-parallel"]),
    ],
)
def test_help_teaches(arguments: list[str], expected: list[str]) -> None:
    result = run(*arguments, "--help")
    assert result.exit_code == 0
    assert [word for word in expected if word not in result.output] == []


@pytest.mark.parametrize("verb", [command.callback.__name__ for command in app.registered_commands])
def test_help_has_each_command_on_a_line_of_its_own(verb: str) -> None:
    result = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).invoke(app, [verb, "--help"])
    lines = [line.strip() for line in result.output.splitlines()]
    commands = [line for line in lines if line.startswith((f"paceline {verb} ", "torchrun "))]
    assert commands
    assert [line for line in commands if line.count("paceline ") + line.count("paceline.cli.main ") != 1] == []


def test_help_costs_no_pytorch() -> None:
    code = "import sys; from paceline.cli.main import app; app(['train', '--help'], standalone_mode=False); "
    code += "app(['plan', '--help'], standalone_mode=False); "
    code += "heavy = {'torch', 'numpy', 'scipy', 'paceline.train'} & set(sys.modules); sys.exit(bool(heavy))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "no-such.yaml"], "there is no recipe no-such.yaml"),
        (["train", ROOT / "recipes/digits.yaml", "--set", "train.stpes=1"], "Did you mean 'steps'?"),
        (["train", ROOT / "recipes/digits.yaml", "--mesh", "dp=5"], "batches that would: 60, 65."),
        (["train", ROOT / "recipes/digits.yaml", "--resume"], "nothing to resume"),
        (["verify", "--mesh", "dp=2"], "either a RECIPE or --model FACTORY"),
        (["verify", "--model", "m.py:build"], "name the mesh"),
        (["bench", "data-paralel"], "Did you mean 'data-parallel'?"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str | Path], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_usage_errors_exit_with_2_too() -> None:
    assert run("trian").exit_code == 2
    assert run("verify", "--dtype", "float16").exit_code == 2


def test_a_launcher_that_does_not_fit_the_mesh_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = run("train", ROOT / "recipes/digits.yaml", "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "mesh 'dp=2' has 2 ranks, but 4 were started" in result.stderr
    result = run("train", ROOT / "recipes/digits.yaml", "--mesh", "dp=4")
    assert result.exit_code == 2
    assert "name it with --out DIR" in result.stderr
    result = run("train", ROOT / "recipes/digits.yaml", "--mesh", "dp=4", "--launch", "inprocess")
    assert result.exit_code == 2
    assert "leave out inprocess" in result.stderr
