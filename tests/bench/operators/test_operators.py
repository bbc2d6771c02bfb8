"""`paceline bench operators` at toy size: it runs, on real processes, and the keys of its JSON are there."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from paceline.bench.operators.contestants import AXES, ON_SHM, PEERS, Contestant, can_train, mesh_of, opponent, ours
from paceline.bench.operators.main import Settings, _activations, main
from paceline.bench.operators.page import of_activations, of_steps
from paceline.bench.operators.workloads import Model
from paceline.errors import RecipeError


def test_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "scale": "tiny",
        "rounds": "1",
        "steps": "1",
        "models": "gpt",
        "peers": "serial,tp,tp-shm",
        "memory": "no",
    }
    whole = json.loads(json.dumps(main(options)))
    result = {key: found.get("gpt") for key, found in whole.items()}

    assert result["left_out"] == {}
    assert set(result["ratios"]) == set(result["spread"]) == {"serial", "tp", "tp-shm", "tp-gloo"}
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in result["ratios"].values())
    both = {"paceline-tp", "paceline-sp"}
    assert set(result["rounds"]) == {"serial", "tp", "tp-shm", *both}
    assert set(result["gloo"]["step_s"]) == {"tp", "paceline-tp"}
    assert set(result["every_ratio"]) == both
    assert all(set(compared) == {"serial", "tp", "tp-shm"} for compared in result["every_ratio"].values())
    assert set(result["start"]) == both
    # All train what serial does.
    assert [*result["loss"].values()] == pytest.approx([result["loss"]["serial"]] * 5, rel=1e-5)
    printed = capsys.readouterr().out
    assert "paceline-sp" in printed and "on Gloo alone" in printed
    rows = [*of_steps(whole)]
    assert len(rows) == 2 + 4
    assert rows[-1].startswith("| gpt | `tp=2` | tp, both on Gloo | ")


def test_activations_are_what_a_step_needs_beyond_what_is_held() -> None:
    memory = {
        Contestant.SERIAL: {"step_bytes": 90, "start_bytes": 5, "held_bytes": 10},
        Contestant.OURS_HW: {"step_bytes": 60, "start_bytes": 5, "held_bytes": 12},
    }
    activations = _activations(memory)
    assert activations == {
        Contestant.SERIAL: {"bytes": 80, "of_serial": 1.0},
        Contestant.OURS_HW: {"bytes": 48, "of_serial": 0.6},
    }
    assert _activations({Contestant.OURS_HW: memory[Contestant.OURS_HW]}) == {Contestant.OURS_HW: {"bytes": 48}}
    times = {"unet": {Contestant.OURS_HW: {Contestant.SERIAL: 0.7}}}
    result = {"settings": {"ranks": 2}, "activations": {"unet": activations}, "every_ratio": times}
    assert [*of_activations(result)][2:] == ["| unet | `hw=2` | 0 | 0 | 0.60 | 0.70 |"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round": "3"}, "Did you mean 'rounds'?"),
        ({"rounds": "0"}, "a whole number from 1"),
        ({"ranks": "1"}, "a whole number from 2"),
        ({"models": "gpt,lama"}, "Did you mean 'llama'?"),
        ({"peers": "ddp,paceline-tp"}, "there is no 'paceline-tp' in peers"),
        ({"gloo": "maybe"}, "yes or no"),
    ],
)
def test_settings_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        Settings.read(options)
    assert message in str(error.value)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("model", Model)
def test_every_peer_has_an_opponent_that_runs(model: Model, ranks: int) -> None:
    settings = Settings(ranks=ranks)
    running = settings.contestants(model)
    assert running[: len(ours(model, ranks))] == ours(model, ranks)
    for who in running:
        if who in AXES:
            assert mesh_of(who, ranks).size == ranks
        else:
            assert opponent(who, model, ranks) in running
    alone = settings.on_gloo_alone(model)
    assert not any(who in ON_SHM for who in alone)
    assert any(who in AXES for who in alone) == model.has_tensor_parallel


def test_what_torch_cannot_split_has_other_peers() -> None:
    def of(model: Model, ranks: int) -> set[Any]:
        return {peer for peer in PEERS if can_train(peer, model, ranks) and peer not in ON_SHM}

    apart = {Contestant.SERIAL, Contestant.DDP, Contestant.FSDP2}
    assert of(Model.UNET, 2) == of(Model.GPT_FUSED, 4) == apart
    layers = {Contestant.TP, Contestant.TP_LOSS, Contestant.TP_SEQUENCE}
    assert of(Model.GPT, 2) == apart | layers
    assert of(Model.LLAMA, 4) == apart | layers | {Contestant.FSDP2_TP}
