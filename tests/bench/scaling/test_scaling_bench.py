"""`paceline bench scaling`: what it makes of times, what it shows and draws, and that it runs at toy size."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline.bench.scaling.jobs import Scaling, of_size
from paceline.bench.scaling.main import Settings, main, powers_of_two, summary
from paceline.bench.scaling.picture import save_picture
from paceline.bench.scaling.table import print_tables
from paceline.errors import LaunchError, RecipeError


def made(serial: float = 0.1, ranks: tuple[int, ...] = (1, 2, 4)) -> dict[str, Any]:
    """What is found where a step of one second has a serial part, three rounds alike but for a per cent."""
    noise = (0.99, 1.0, 1.01)
    times = {
        Scaling.STRONG: {n: [each * (serial + (1 - serial) / n) for each in noise] for n in ranks},
        Scaling.WEAK: {n: [each / (1 - serial * (n - 1) / n) for each in noise] for n in ranks},
        Scaling.EAGER: {1: [1.1, 1.1, 1.1]},
    }
    found = summary(ranks, times, predict=(2, 8, 1024))
    settings = {"ranks": list(ranks), "passes": 1, "rounds": 3, "steps": 2, "batch": 8, "axis": "dp"}
    machine = {"cores": 2, "processor": "a processor", "torch": "2", "backend": "shared memory", "load_before": 3.0}
    return {"title": "GPT", "settings": settings, "machine": machine, **found}


def shown(result: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_tables(console, result)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_fractions_and_what_they_predict() -> None:
    found = made(0.1)
    json.dumps(found, allow_nan=False)
    strong, weak = found["strong"], found["weak"]
    assert strong["fraction"]["value"] == pytest.approx(0.1) and weak["fraction"]["value"] == pytest.approx(0.1)
    assert strong["fraction"]["low"] <= 0.1 <= strong["fraction"]["high"]
    assert strong["limit"]["value"] == pytest.approx(10) and "limit" not in weak
    assert set(strong["predicted"]) == {"8", "1024"}  # 2 was measured
    assert strong["predicted"]["1024"]["speedup"] == pytest.approx(10, rel=0.01)
    assert weak["predicted"]["1024"]["speedup"] == pytest.approx(1024 - 0.1 * 1023)
    for kind in (strong, weak):
        for each in kind["predicted"].values():
            assert each["low"] <= each["speedup"] <= each["high"]
        assert kind["residual"] == pytest.approx(0, abs=1e-9)
    assert strong["speedup"]["4"]["median"] == pytest.approx(1 / 0.325)
    assert weak["speedup"]["4"]["median"] == pytest.approx(4 - 0.1 * 3)


def test_two_numbers_of_ranks_leave_nothing_to_check_the_law_with() -> None:
    found = made(ranks=(1, 2))
    assert found["strong"]["residual"] is None
    assert shown(found).count("nothing is left") == 2 and "nothing is left" not in shown(made())


def test_no_serial_part_has_no_limit() -> None:
    found = made(-0.05)
    assert found["strong"]["limit"]["value"] is None and found["strong"]["predicted"]["8"]["speedup"] == 8
    assert "limit of the speed-up: none" in shown(found)


def test_it_is_told_that_other_work_ran_and_that_ranks_share_cores() -> None:
    said = shown(made())
    assert "these are no numbers" in said and "2 cores: more ranks share them" in said
    assert "share them" not in shown(made(ranks=(1, 2)))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("serial", [-0.05, 0.1])
def test_it_is_drawn(suffix: str, serial: float, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"scaling{suffix}"
    save_picture(made(serial), file)
    assert file.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


def test_settings_are_read_and_checked() -> None:
    settings = Settings.read({"ranks": "4,1,2", "batch": "12", "axis": "fsdp", "predict": "16", "backend": "gloo"})
    assert settings.ranks == (1, 2, 4) and settings.axis == "fsdp" and settings.predict == (16,)
    assert powers_of_two(1) == powers_of_two(2) == (1, 2) and powers_of_two(7) == (1, 2, 4)
    for options, says in (
        ({"ranks": "2,4"}, "relative to 1"),
        ({"ranks": "1"}, "relative to 1"),
        ({"ranks": "1,3"}, "cannot be divided evenly among 3 ranks"),
        ({"axis": "tp"}, "no 'tp' in axis"),
        ({"plot": "curves.jpg"}, "no picture"),
        ({"rank": "1,2"}, "unknown setting 'rank'"),
    ):
        with pytest.raises(RecipeError, match=says):
            Settings.read(options)
    with pytest.raises(LaunchError):
        Settings.read({"backend": "glo"})


def test_a_batch_is_made_larger_by_its_own_samples() -> None:
    batch = {"tokens": torch.arange(6).reshape(3, 2)}
    assert of_size(batch, 5)["tokens"][:, 0].tolist() == [0, 2, 4, 0, 2]
    assert of_size(batch, 2)["tokens"][:, 0].tolist() == [0, 2]


def test_it_runs_on_real_processes() -> None:
    found = main({"scale": "tiny", "batch": "2", "passes": "1", "rounds": "2", "steps": "1", "ranks": "1,2"})
    assert set(found["strong"]["step_s"]) == set(found["weak"]["step_s"]) == {"1", "2"}
    assert found["strong"]["step_s"]["1"] == found["weak"]["step_s"]["1"]
    assert found["eager_s"]["median"] > 0 and found["machine"]["backend"]
    assert found["settings"]["axis"] == "dp"
    json.dumps(found, allow_nan=False)
