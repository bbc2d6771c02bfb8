import json
import math

import pytest
from torch import nn

from paceline.errors import RecipeError
from paceline.train.optim import (
    build_optimizer,
    build_schedule,
    load_schedule_state,
    schedule_state,
    states_per_element,
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def rates(name: str, steps: int, **settings) -> list[float]:
    optimizer = build_optimizer(net(), "SGD", {"lr": 2.0})
    schedule = build_schedule(optimizer, name, steps=steps, **settings)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_vectors_are_not_decayed_unless_asked_for():
    groups = build_optimizer(net(), "AdamW", {"lr": 1e-3, "weight_decay": 0.1}).param_groups
    assert [(g["weight_decay"], {p.dim() for p in g["params"]}) for g in groups] == [(0.1, {2}), (0.0, {1})]
    (group,) = build_optimizer(net(), "AdamW", {"weight_decay": 0.1}, decay_vectors=True).param_groups
    assert group["weight_decay"] == 0.1 and len(group["params"]) == 6


def test_fused_where_there_is_one_and_not_chosen():
    assert build_optimizer(net(), "AdamW").defaults["fused"] is True
    assert build_optimizer(net(), "AdamW", {"fused": False}).defaults["fused"] is False
    assert "fused" not in build_optimizer(net(), "RMSprop").defaults


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("AdamW", {}, 2),
        ("AdamW", {"amsgrad": True}, 3),
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("RMSprop", {"centered": True}, 2),
    ],
)
def test_what_an_optimizer_keeps_is_counted(name, options, count):
    assert states_per_element(name, options) == count


def test_frozen_parameters_are_left_out():
    module = net()
    module[0].weight.requires_grad_(False)
    assert sum(len(g["params"]) for g in build_optimizer(module, "Adam").param_groups) == 5
    with pytest.raises(RecipeError, match="nothing for Adam to train"):
        build_optimizer(module.requires_grad_(False), "Adam")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("AdamX", {}, "no optimizer 'AdamX'.*Did you mean 'Adam"),
        ("LBFGS", {}, "cannot be used: it evaluates the loss several times"),
        ("Muon", {}, "whole matrices"),
        ("AdamW", {"beta": 1}, "no option 'beta'.*Did you mean 'betas'"),
        ("AdamW", {"lr": -1.0}, "refuses its options.*Invalid learning rate"),
    ],
)
def test_refusals_teach(name, options, message):
    with pytest.raises(RecipeError, match=message):
        build_optimizer(net(), name, options)


def test_linear_warms_up_and_ends_at_its_floor():
    assert rates("linear", 6, warmup=2, floor=0.5) == pytest.approx([1.0, 2.0, 2.0, 1.75, 1.5, 1.25])


def test_cosine_is_half_way_down_in_the_middle():
    seen = rates("cosine", 8)
    assert seen[0] == 2.0 and seen[4] == pytest.approx(1.0) and seen[7] == pytest.approx(1 + math.cos(7 * math.pi / 8))


def test_constant_and_the_classes_of_torch():
    assert rates("constant", 3) == [2.0, 2.0, 2.0]
    assert rates("StepLR", 4, options={"step_size": 2, "gamma": 0.5}) == [2.0, 2.0, 1.0, 1.0]
    warmed = rates("StepLR", 6, warmup=2, options={"step_size": 2, "gamma": 0.5})
    assert warmed == pytest.approx([1.0, 2.0, 2.0, 2.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cosine", {}),
        ("MultiStepLR", {"milestones": [3, 6]}),
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 20}),
        ("CosineAnnealingWarmRestarts", {"T_0": 4}),
        ("PolynomialLR", {"total_iters": 9, "power": 2.0}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 2])
def test_a_schedule_goes_on_from_its_state_as_json(name, options, warmup):
    def make():
        optimizer = build_optimizer(net(), "AdamW", {"lr": 1.0, "weight_decay": 0.1})
        return optimizer, build_schedule(optimizer, name, steps=12, warmup=warmup, options=options)

    def advance(optimizer, schedule, steps):
        seen = []
        for _ in range(steps):
            seen.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            schedule.step()
        return seen

    straight = make()
    resumed = make()
    advance(*straight, 5)
    load_schedule_state(resumed[1], json.loads(json.dumps(schedule_state(straight[1]))))
    assert advance(*resumed, 6) == advance(*straight, 6)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cosin", {}, "no schedule 'cosin'.*Did you mean 'cosine'"),
        ("StepLR", {"options": {"step": 2}}, "no option 'step'.*Did you mean 'step_size'"),
        ("StepLR", {}, "refuses its options"),
        ("cosine", {"warmup": 11}, "from 0 to the length of the run"),
        ("cosine", {"floor": 2.0}, "fraction of the peak"),
        ("cosine", {"options": {"gamma": 1}}, "takes warmup and floor only"),
    ],
)
def test_schedules_refuse(name, settings, message):
    with pytest.raises(RecipeError, match=message):
        build_schedule(build_optimizer(net(), "SGD"), name, steps=10, **settings)
