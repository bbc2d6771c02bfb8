"""`paceline schedule`: what it says and where, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.schedule import Kind, communicate, make
from paceline.schedule.actions import Edges
from paceline.schedule.files import load, save


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["schedule", *map(str, arguments)])


@pytest.mark.parametrize("kind", [kind.value for kind in Kind])
def test_every_kind_is_drawn_and_accounted_for(kind: str) -> None:
    chunks = ["--chunks", "2"] if kind == "interleaved" else []
    result = run(kind, "--ranks", "2", "--micro-batches", "4", *chunks)
    assert result.exit_code == 0, result.output
    assert "rank 1" in result.stdout and "bubble" in result.stdout and "weight versions" in result.stdout


def test_it_says_what_a_schedule_takes() -> None:
    result = run("pipedream", "--ranks", "4", "--micro-batches", "8", "--json", "-")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["bubble"] == pytest.approx(3 / 11) and told["makespan"] == 33
    assert told["rank_peaks"] == told["stage_versions"] == [4, 3, 2, 1]
    assert told["asynchronous"] and told["messages"] == 48


def test_replicas_say_how_many_ranks_there_are() -> None:
    result = run("pipedream", "--replicas", "2,1", "--micro-batches", "4", "--json", "-")
    assert json.loads(result.stdout)["replicas"] == [[0, 1], [2]]
    assert run("pipedream", "--ranks", "4", "--replicas", "2,1", "--micro-batches", "4").exit_code == 2


def test_options_reach_the_schedule() -> None:
    batches = run("pipedream-2bw", "--ranks", "2", "--micro-batches", "3", "--batches", "4", "--json", "-")
    assert json.loads(batches.stdout)["micro_batches"] == 12
    synced = run("pipedream", "--ranks", "3", "--micro-batches", "9", "--vertical-sync", "--json", "-")
    assert json.loads(synced.stdout)["stage_versions"] == [3, 3, 3]


def test_actions_are_written_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    assert run("zb-v", "--ranks", "2", "--micro-batches", "4", "-o", file).exit_code == 0
    assert load(file) == make("zb-v", 2, 4)
    assert run("--file", file, "-o", tmp_path / "own.svg").exit_code == 0
    assert (tmp_path / "own.svg").read_text().startswith("<svg")


def test_messages_of_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    save(communicate(make("1f1b", 2, 2), Edges.chain(2)), file)
    assert run("--file", file).exit_code == 0
    file.write_text(file.read_text().replace('"RECV 1 1 act 0", ', ""))
    result = run("--file", file)
    assert result.exit_code == 2 and "rank 1 lacks the action RECV stage 1 micro-batch 1 act from 0" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one schedule: a KIND (naive, gpipe"),
        (["1f1b", "--file", "a.json"], "name one schedule"),
        (["1f1", "--ranks", "2", "--micro-batches", "2"], "Did you mean '1f1b'?"),
        (["1f1b", "--micro-batches", "2"], "--ranks is missing"),
        (["1f1b", "--ranks", "2"], "--micro-batches is missing"),
        (["1f1b", "--micro-batches", "2", "--replicas", "2,x"], "such as 2,1"),
        (["1f1b", "--micro-batches", "2", "--replicas", "0"], "such as 2,1"),
        (["pipedream-2bw", "--ranks", "4", "--micro-batches", "2"], "at least 4, not 2"),
        (["--file", "missing.json"], "missing.json cannot be read"),
        (["--file", "missing.json", "--ranks", "2"], "leave out the options that make one"),
        (["1f1b", "--ranks", "2", "--micro-batches", "2", "-o", "a.gif"], "a.gif is no picture"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
