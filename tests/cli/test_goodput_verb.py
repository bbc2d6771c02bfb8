"""`paceline goodput`: what it says and where, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.goodput import clock
from paceline.cli.main import app

MINIMUM = ("--cluster", "dgx-h100", "--devices", "16384", "--checkpoint-s", "30", "--runs", "3")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["goodput", *map(str, arguments)])


def told(*arguments: str) -> dict[str, object]:
    result = run(*MINIMUM, *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    values: dict[str, object] = json.loads(result.stdout)
    return values


def test_it_names_the_best_interval_and_the_formulas() -> None:
    result = run(*MINIMUM, "--days", "10")
    assert result.exit_code == 0, result.output
    assert "16,384 devices of dgx-h100" in result.stdout
    assert re.search(r"best of these: every .*, \d\d\.\d\d%", result.stdout)
    assert "Young every" in result.stdout and "Daly every" in result.stdout
    assert "spare" not in result.stdout  # nothing waits where repairs take no time


def test_the_object_has_a_policy_for_each_number_of_spares() -> None:
    values = told("--spares", "0,100", "--repair-hours", "5", "--intervals-s", "300,900", "--days", "20")
    assert values["devices"] == 16384 and values["runs"] == 3 and values["checkpoint_s"] == 30
    without, many = values["policies"]
    assert (without["spares"], many["spares"]) == (0, 100)
    assert [row["interval_s"] for row in without["intervals"]] == [300, 900]
    for policy in (without, many):
        best = max(policy["intervals"], key=lambda row: row["goodput"])
        assert policy["best"] == best
        for row in policy["intervals"]:
            assert sum(row["shares"].values()) == pytest.approx(1)
            assert row["low"] <= row["goodput"] <= row["high"] and 0 < row["young"] < row["daly"] + 0.01
    assert without["best"]["shares"]["waiting"] > 0.3 > 0 == many["best"]["shares"]["waiting"]


def test_options_reach_the_simulation() -> None:
    def mean(*arguments: str) -> float:
        seconds = told("--days", "1", "--intervals-s", "600", *arguments)["mean_s"]
        assert isinstance(seconds, float)
        return seconds

    assert mean("--failures-per-device-hour", "1e-3") == pytest.approx(3600 / 16.384)
    planned = told("--announced", "1", "--days", "5", "--intervals-s", "600")["policies"]
    assert planned[0]["best"]["shares"]["lost"] == 0
    slow = told("--write-s", "300", "--detect-s", "900", "--days", "5")
    assert slow["write_s"] == 300
    assert min(row["interval_s"] for row in slow["policies"][0]["intervals"]) >= 300


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_it_is_drawn(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"weeks{suffix}"
    result = run(*MINIMUM, "--days", "3", "--spares", "0,2", "--repair-hours", "2", "-o", file)
    assert result.exit_code == 0, result.output
    assert file.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--spares", "0,x"), "there is 'x' in --spares"),
        (("--intervals-s", "0"), "there is '0' in --intervals-s"),
        (("--intervals-s", "10", "--write-s", "60"), "would overlap"),
        (("--announced", "2"), "between 0 and 1"),
        (("--failures-per-device-hour", "0"), "does not say how often"),
        (("-o", "weeks.jpg"), "weeks.jpg is no picture"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], says: str) -> None:
    result = run(*MINIMUM, *arguments)
    assert result.exit_code == 2 and says in result.output


def test_times_read_as_people_say_them() -> None:
    assert [clock(s) for s in (9.5, 59, 60, 250, 3599, 10000)] == [
        "9.5 s",
        "59 s",
        "1 min 00 s",
        "4 min 10 s",
        "59 min 59 s",
        "2 h 46 min",
    ]
