"""Run directories and JSON files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.output import RUN_MARKER, latest_run_dir, new_run_dir, write_json
from paceline.errors import RecipeError


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def begin(path: Path) -> Path:
    (path / RUN_MARKER).write_text("name: x\n")
    return path


def test_runs_are_numbered_and_the_latest_is_the_highest_number() -> None:
    runs = [begin(new_run_dir(None, "gpt")) for _ in range(10)]
    new_run_dir(None, "gpt-2")
    new_run_dir(None, "gpt")  # died before it began: nothing to go on with
    assert [path.name for path in runs] == [f"gpt-{n}" for n in range(1, 11)]
    assert latest_run_dir(None, "gpt") == runs[-1]
    assert latest_run_dir(Path("runs"), "gpt") == runs[-1]


def test_a_named_directory_is_used_once() -> None:
    run = begin(new_run_dir(Path("a/b"), "gpt"))
    assert latest_run_dir(run, "gpt") == run
    with pytest.raises(RecipeError, match="--resume"):
        new_run_dir(run, "gpt")


def test_nothing_to_resume_is_said() -> None:
    with pytest.raises(RecipeError, match="nothing to resume"):
        latest_run_dir(None, "gpt")


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    Path("file").write_text("")
    with pytest.raises(RecipeError, match="cannot be made"):
        new_run_dir(Path("file/run"), "gpt")


def test_json_goes_to_a_file_or_to_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"equal": True}, Path("deep/result.json"))
    write_json({"equal": False}, Path("-"))
    assert json.loads(Path("deep/result.json").read_text()) == {"equal": True}
    assert json.loads(capsys.readouterr().out) == {"equal": False}
    Path("file").write_text("")
    with pytest.raises(RecipeError, match="cannot be written"):
        write_json({}, Path("file/result.json"))
