"""`paceline bench data-parallel` at toy size: it runs, on real processes, and the keys of its JSON are there."""

from __future__ import annotations

import json
import math

import pytest

from paceline.bench.contestants import OURS, Contestant
from paceline.bench.data_parallel.main import Settings, main
from paceline.bench.workloads import Model
from paceline.errors import LaunchError, RecipeError
from paceline.runtime.process_memory import can_take_memory


def test_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    options = {"scale": "tiny", "rounds": "1", "steps": "1", "models": "resnet"}
    options["peers"] = "serial,ddp,ddp-shm,ddp-sync-batch-norm,fsdp2-shm"
    result = {key: found.get("resnet") for key, found in json.loads(json.dumps(main(options))).items()}

    assert set(result["left_out"]) == {"ddp-sync-batch-norm"}  # PyTorch has none for CPUs
    peers = {"serial", "ddp", "ddp-shm", "fsdp2-shm"}
    assert set(result["ratios"]) == set(result["spread"]) == peers
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in result["ratios"].values())
    assert set(result["rounds"]) == {*peers, "paceline-dp", "paceline-fsdp"}
    assert result["start"]["cold"]["capture_s"] > 0
    warm = result["start"]["warm"]
    assert warm["total_s"] > 0 and warm["capture_s"] == warm["place_s"] == 0.0  # the second start found its program
    if can_take_memory():
        assert set(result["memory"]) == set(result["rounds"])
    # Ours trained what serial does; DDP normalises other samples together.
    loss = result["loss"]
    assert [loss["paceline-dp"], loss["paceline-fsdp"]] == pytest.approx([loss["serial"]] * 2, rel=1e-5)
    assert loss["ddp"] != pytest.approx(loss["serial"], rel=1e-5)
    # A peer trains the same on either backend.
    assert [loss["ddp-shm"], loss["fsdp2-shm"]] == pytest.approx([loss["ddp"]] * 2, rel=1e-6)
    assert {who: name for who, name in result["backend"].items() if who not in OURS} == {
        "ddp": "gloo",
        "ddp-shm": "shm",
        "fsdp2-shm": "shm",
    }

    printed = capsys.readouterr().out
    assert "paceline-fsdp" in printed and "left out: ddp-sync-batch-norm" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round": "3"}, "Did you mean 'rounds'?"),
        ({"rounds": "0"}, "a whole number from 1"),
        ({"ranks": "1"}, "a whole number from 2"),
        ({"models": "gpt,lama"}, "Did you mean 'llama'?"),
        ({"peers": "ddp,paceline-dp"}, "there is no 'paceline-dp' in peers"),
        ({"memory": "maybe"}, "yes or no"),
    ],
)
def test_settings_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        Settings.read(options)
    assert message in str(error.value)


def test_the_backend_of_ours_is_checked() -> None:
    with pytest.raises(LaunchError, match="Did you mean 'gloo'"):
        Settings.read({"backend": "glo"})


def test_ours_come_first_and_only_where_a_peer_needs_them() -> None:
    settings = Settings.read({"peers": "ddp,fsdp2-zero2"})
    assert settings.contestants(Model.GPT) == (
        Contestant.OURS_DP,
        Contestant.OURS_FSDP_ZERO2,
        Contestant.DDP,
        Contestant.FSDP2_ZERO2,
    )
