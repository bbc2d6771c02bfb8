"""Optimizer state by name: any optimizer, any order of groups, and errors that name what does not fit."""

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.train.checkpoint import Checkpointer
from tests.train.checkpoint.sharded import Sharded, adamw, assert_same, everything, split, train

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW, learning rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_nothing_had_happened(tmp_path, name):
    module = Sharded("fsdp=2", split(0))
    optimizer = OPTIMIZERS[name](module.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(module, optimizer, range(2))
    schedule.step()
    Checkpointer(tmp_path, module, optimizer).save(2, {}, block=True)
    train(module, optimizer, range(2, 4))
    wanted = everything(module, optimizer)

    again = Sharded("fsdp=2", split(0), seed=3)
    optimizer = OPTIMIZERS[name](again.parameters())
    Checkpointer(tmp_path, again, optimizer).restore()
    assert optimizer.param_groups[0]["initial_lr"] > optimizer.param_groups[0]["lr"] > 0
    train(again, optimizer, range(2, 4))
    assert_same(everything(again, optimizer), wanted)


def test_order_of_groups_and_parameters_means_nothing(tmp_path):
    module = Sharded("fsdp=2")
    optimizer = adamw(module)
    train(module, optimizer, range(2))
    Checkpointer(tmp_path, module, optimizer).save(2, {}, block=True)
    wanted = everything(module, optimizer)

    again = Sharded("fsdp=2", seed=4)
    first, second = adamw(again).param_groups
    optimizer = torch.optim.AdamW([{"params": second["params"][::-1]}, {"params": first["params"][::-1]}], lr=1.0)
    Checkpointer(tmp_path, again, optimizer).restore()
    assert_same(everything(again, optimizer), wanted)
    hyper = [(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
    assert hyper == [(3e-3, 0.0, (0.9, 0.95)), (1e-2, 0.1, (0.9, 0.95))]


def test_state_before_the_first_step_and_frozen_parameters(tmp_path):
    module = Sharded("serial")
    optimizer = torch.optim.AdamW(module.parameters()[:2])
    Checkpointer(tmp_path, module, optimizer).save(0, {}, block=True)
    train(module, optimizer, range(2))
    Checkpointer(tmp_path, module, optimizer).restore()
    assert not optimizer.state
    train(module, optimizer, range(2))
    wanted = everything(module, optimizer)
    Checkpointer(tmp_path, module, optimizer).restore()
    train(module, optimizer, range(2))
    assert_same(everything(module, optimizer), wanted)


def test_groups_and_optimizers_that_do_not_fit_are_named(tmp_path):
    module = Sharded("serial")
    optimizer = adamw(module)
    Checkpointer(tmp_path, module, optimizer).save(1, {}, block=True)
    before = everything(module, optimizer)
    one_group = torch.optim.AdamW(module.parameters())
    with pytest.raises(CheckpointError, match=r"parameter group of emb.weight, half, lin.bias and 3 more: .*no group"):
        Checkpointer(tmp_path, module, one_group).restore()
    with pytest.raises(CheckpointError, match="optimizer SGD: the checkpoint has the state of AdamW"):
        Checkpointer(tmp_path, module, torch.optim.SGD(adamw(module).param_groups, lr=0.1)).restore()
    assert_same(everything(module, optimizer), before)


def test_parameters_of_another_module_are_noticed(tmp_path):
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(CheckpointError, match=r"1 of 1 parameters of the optimizer are not the module's"):
        Checkpointer(tmp_path, Sharded("serial"), stranger).save(1, {})


def test_state_that_cannot_be_split_is_refused(tmp_path):
    """Adafactor keeps sums over rows and columns, which mean nothing for another cut."""
    module = Sharded("fsdp=2", split(0))
    optimizer = torch.optim.Adafactor(module.parameters())
    train(module, optimizer, range(1))
    with pytest.raises(CheckpointError, match=r"Adafactor keeps '\w+_var' of shape .*'emb.weight'"):
        Checkpointer(tmp_path, module, optimizer).save(1, {})
    module = Sharded("dp=2", split(None))
    optimizer = torch.optim.Adafactor(module.parameters())
    train(module, optimizer, range(1))
    Checkpointer(tmp_path, module, optimizer).save(1, {}, block=True)
    Checkpointer(tmp_path, module, optimizer).restore()
