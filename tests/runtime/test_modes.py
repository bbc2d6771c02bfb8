"""Modes of the caller's: parts of a module that stay in evaluation, and calls that record no gradients."""

import copy

import pytest
import torch
from torch import nn

from paceline.plan import Mesh, Plan
from paceline.runtime.module import parallelize


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(6, 1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.out(self.drop(self.norm(x))), y)


def test_a_frozen_batch_norm_stays_frozen_in_training():
    torch.manual_seed(0)
    module = Frozen().double()
    module.norm.eval()
    batch = (torch.randn(8, 6).double() + 3, torch.randn(8, 1).double())
    serial = copy.deepcopy(module)
    parallel = parallelize(module, batch, Plan(Mesh.parse("dp=2")), devices=["cpu"])
    for _ in range(2):  # evaluation in between must not thaw it
        torch.manual_seed(5)
        expected = serial(*batch)
        parallel.seed(5)
        torch.testing.assert_close(parallel(*batch), expected, rtol=1e-12, atol=0)
        parallel.eval()
        parallel(*batch)
        parallel.train()
    assert module.norm.training is False and module.drop.training is True
    assert torch.equal(parallel.full_state_dict()["norm.running_mean"], torch.zeros(6).double())


def test_a_module_given_in_evaluation_is_trained_whole():
    module = Frozen().eval()
    batch = (torch.randn(8, 6), torch.randn(8, 1))
    parallel = parallelize(module, batch, devices=["cpu"])
    parallel(*batch)
    assert not torch.equal(parallel.full_state_dict()["norm.running_mean"], torch.zeros(6))
    assert not module.training


@pytest.mark.parametrize("unrecorded", [torch.no_grad, torch.inference_mode])
def test_a_step_that_is_first_called_for_its_loss_alone_can_be_trained_later(unrecorded):
    torch.manual_seed(0)
    module = Frozen().double()
    batches = [(torch.randn(size, 6).double(), torch.randn(size, 1).double()) for size in (4, 8)]
    serial = copy.deepcopy(module)
    parallel = parallelize(module, batches[0], Plan(Mesh.parse("dp=2")), devices=["cpu"])
    with unrecorded():
        for batch in batches:
            parallel.seed(3)
            torch.manual_seed(3)
            torch.testing.assert_close(parallel(*batch), serial(*batch), rtol=1e-12, atol=0)
        assert not torch.is_grad_enabled()
    for batch in batches:
        parallel.seed(4)
        torch.manual_seed(4)
        parallel(*batch).backward()
        serial(*batch).backward()
    for shard in parallel.shards():
        if shard.is_parameter:
            torch.testing.assert_close(shard.tensor.grad, serial.get_parameter(shard.name).grad, rtol=1e-10, atol=1e-12)
