"""`paceline bench pipelines` at toy size: it runs, on real processes, and the keys of its JSON are there."""

from __future__ import annotations

import json

import pytest

from paceline.bench.pipelines.contestants import Contestant, Cut, Schedule, Setting, Side
from paceline.bench.pipelines.figures import Seen, bound, compared
from paceline.bench.pipelines.main import Settings, check_losses, main, opponent
from paceline.bench.pipelines.page import of_bubbles, of_steps
from paceline.bench.workloads import Scale
from paceline.errors import RecipeError


def test_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"scale": "tiny", "rounds": "1", "steps": "1", "schedules": "1f1b", "gloo": "no", "memory": "no"}
    whole = json.loads(json.dumps(main(options)))
    result = {key: found.get("gpt") for key, found in whole.items()}

    assert result["left_out"] == {}
    assert set(result["ratios"]) == set(result["spread"]) == {"serial", "torch-1f1b"}
    assert set(result["rounds"]) == {"serial", "torch-1f1b", "paceline-1f1b", "control-1f1b"}
    for key in ("bound", "control"):
        assert result[key]["1f1b"]["median"] * result[key]["1f1b"]["least_s"] == pytest.approx(
            result["step_s"]["paceline-1f1b"]["median"]
        )
    bubble = result["bubble"]["1f1b"]
    assert bubble["formula"] == pytest.approx(1 / 5)
    assert 0 < bubble["of_durations"] < 1 and 0 < bubble["median"] < 1
    assert bubble["computing"] + bubble["sending"] + bubble["receiving"] < 1
    held = result["activations"]["1f1b"]
    assert held["micro_batches"] == [2, 1]
    for predicted, measured in zip(held["predicted"], held["measured"], strict=True):
        assert 0.9 * predicted < measured < 1.3 * predicted  # and what waits to be sent
    printed = capsys.readouterr().out
    assert "the same without communication" in printed
    assert len([*of_steps(whole)]) == len([*of_bubbles(whole)]) == 2 + 1


def test_who_trains_something_else_is_not_compared() -> None:
    losses = {"serial": 2.0, "torch-1f1b": 2.0001, "control-1f1b": 0.0}
    check_losses({"loss": losses, "next_loss": losses})
    with pytest.raises(RuntimeError, match=r"torch-1f1b .* serial .* next loss is 2\.001000"):
        check_losses({"loss": losses, "next_loss": {**losses, "torch-1f1b": 2.001}})


def test_the_bound_of_1f1b_is_serial_divided_among_ranks_with_its_bubble() -> None:
    setting = Setting(Scale.FULL, 4, Cut.AUTO)
    assert bound(setting, Schedule.ONE_F_ONE_B, [8.0]) == [pytest.approx(8.0 / 4 * (8 + 4 - 1) / 8)]
    assert bound(setting, Schedule.NAIVE, [8.0]) == [pytest.approx(8.0)]


def test_pairs_are_of_one_round_and_the_fastest_of_all() -> None:
    found = compared([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    assert (found["median"], found["min"], found["fastest"]) == (2.0, 1.0, 2.0)
    assert found["low"] == pytest.approx(1.5)


def test_figures_of_what_ranks_were_seen_to_do() -> None:
    setting = Setting(Scale.TINY, 2, Cut.AUTO)  # four micro-batches
    ranks = [
        {"rounds": [{"began": 0.0, "ended": 14.0, "computing": 12.0, "sending": 1.0, "receiving": 1.0}]},
        {"rounds": [{"began": 1.0, "ended": 15.0, "computing": 12.0, "sending": 0.0, "receiving": 2.0}]},
    ]
    layout = {"saved": [10, 20], "forward": [[0, 1]], "backward": [[1, 0]], "held": {}}
    control = [{"durations": {"F 0": 1.0, "B 0": 2.0}}, {"durations": {"F 1": 1.0, "B 1": 2.0}}]
    seen = Seen(
        setting,
        Schedule.ONE_F_ONE_B,
        [{**layout, **ranks[0], "held": {"0": 21}}, {**layout, **ranks[1], "held": {"1": 20}}],
        control,
    )
    bubble = seen.bubble()
    assert bubble["formula"] == bubble["of_durations"] == pytest.approx(1 - 24 / 30)
    assert bubble["median"] == bubble["min"] == pytest.approx(1 - 24 / 30)
    assert bubble["receiving"] == pytest.approx(3 / 30)
    assert seen.stretch == pytest.approx(15 / 12)
    assert seen.least([13.0], [1.0]) == [pytest.approx(12.0 * 15 / 12 + 1.0)]
    assert seen.activations() == {"micro_batches": [2, 1], "predicted": [20, 20], "measured": [21, 20]}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stages_are_equal(ranks: int) -> None:
    for schedule in Schedule:
        setting = Setting(Scale.FULL, ranks, Cut.LAYERS)
        assert setting.layers >= 6 and setting.layers % (ranks * schedule.chunks) == 0
        boundaries = setting.plan(schedule).pipeline.boundaries
        assert len(set(boundaries)) == ranks * schedule.chunks - 1
        assert schedule.control.chunks == schedule.chunks
        assert Contestant.named(str(Contestant(Side.TORCH, schedule))) == Contestant(Side.TORCH, schedule)


def test_opponents_are_on_the_same_schedule() -> None:
    assert opponent("torch-zb-v", [Schedule.ZB_V]) == "paceline-zb-v"
    assert opponent("serial", [*Schedule]) == "paceline-1f1b"
    assert opponent("serial", [Schedule.ZB_V]) == "paceline-zb-v"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round": "3"}, "Did you mean 'rounds'?"),
        ({"ranks": "1"}, "a whole number from 2"),
        ({"schedules": "gpipe,1f1c"}, "Did you mean '1f1b'?"),
        ({"schedules": "pipedream"}, "there is no 'pipedream' in schedules"),
        ({"cut": "block"}, "there is no 'block' in cut"),
        ({"gloo": "maybe"}, "yes or no"),
    ],
)
def test_settings_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        Settings.read(options)
    assert message in str(error.value)
