"""`paceline simulate`: its table, its JSON as documented, its trace, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.trace import Category, from_chrome

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/simulator.md").read_text(encoding="utf-8")
GPT = ["--model", "tests.models:gpt", "--cluster", "laptop", "--mesh"]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def simulated(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def documented(title: str) -> set[str]:
    """The keys in the table below a line of docs/simulator.md."""
    table = PAGE.partition(title)[2].partition("\n\n")[2].partition("\n\n")[0]
    return {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_keys_are_those_of_the_page() -> None:
    told = simulated(*GPT, "dp=2")
    assert set(told) == documented("An object has")
    (rank,) = told["ranks"]
    assert set(rank) == documented("and each of `ranks` has")
    assert set(rank["peak"]) == {"bytes", "phase", "module", "operator", "parts"}
    assert rank["ranks"] == [0, 1] and rank["peak"]["bytes"] == sum(rank["peak"]["parts"].values())
    assert told["step_s"] >= sum(told["phases_s"].values()) * 0.999
    assert rank["handed_bytes"]["dp"] > 0 and "laptop" in told["times"]


def test_a_pipeline_has_a_bubble_and_messages(tmp_path: Path) -> None:
    trace = tmp_path / "deep" / "step.json"
    told = simulated(*GPT, "pp=2", "--micro-batches", "2", "--trace", trace)
    assert [rank["ranks"] for rank in told["ranks"]] == [[0], [1]]
    assert all(rank["bubble_s"] > 0 and rank["handed_bytes"]["pp"] > 0 for rank in told["ranks"])
    events = from_chrome(json.loads(trace.read_text()))
    parts = [event.name for event in events if event.category is Category.PHASE and event.rank == 1]
    assert "F stage 1 micro-batch 0" in parts and parts[-3:] == ["gradients", "norm", "update"]
    assert max(event.ended_s for event in events) <= told["step_s"] * 1.001


def test_a_slow_rank_slows_the_step() -> None:
    quick, slow = simulated(*GPT, "dp=2"), simulated(*GPT, "dp=2", "--slow", "1=3")
    assert [rank["ranks"] for rank in slow["ranks"]] == [[0], [1]]
    waits = [rank["exposed_s"]["dp"] for rank in slow["ranks"]]
    assert slow["step_s"] > 2 * quick["step_s"] and waits[0] > waits[1]


def test_the_table_says_where_the_peak_is() -> None:
    output = run(*GPT, "serial").output
    assert "A step of mesh 'serial'" in output and "Memory at its peak" in output and "modelled for" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name what to simulate"),
        ([*GPT, "dp=2", "--slow", "2=2"], "--slow names rank 2"),
        ([*GPT, "dp=2", "--slow", "1"], "cannot read --slow '1'"),
        ([*GPT, "dp=2", "--slow", "1=0"], "a factor is above 0"),
        ([*GPT, "dp=32"], "devices"),
        (["--model", "tests.models:gpt", "--mesh", "dp=2", "--cluster", "laptpo"], "laptop"),
    ],
)
def test_what_is_refused(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())
