"""Parameters placed in every way: their pieces, who owns them, whole states, and the norm of their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from paceline.placement.placements import REPLICATE, Shard
from paceline.runtime.module import PlacedModule
from tests.runtime.placed import Placements, give_gradients, place_by_hand

R = REPLICATE
WAYS: dict[str, Placements] = {
    "serial": {},
    "dp=2": {},
    "fsdp=2": {"qkv.weight": (Shard(0),), "qkv.bias": (Shard(0),), "out.weight": (Shard(0),)},
    "tp=2": {"qkv.weight": (Shard(0, 3),), "qkv.bias": (Shard(0, 3),), "out.weight": (Shard(1),)},
    "dp=2,tp=2": {"qkv.weight": (R, Shard(0, (16, 4, 4))), "qkv.bias": (R, Shard(0, (16, 4, 4)))},
    "tp=2,sp=2": {"qkv.weight": (Shard(1, 2), R), "out.weight": (Shard(0), R)},
    "fsdp=2,tp=2": {
        "qkv.weight": (Shard(0), Shard(0, (8, 2, 2))),
        "qkv.bias": (R, Shard(0, 3)),
        "out.weight": (Shard(0), Shard(1)),
        "out.bias": (Shard(0), R),
    },
    "tp=2,fsdp=2": {
        "qkv.weight": (Shard(0, 3), Shard(0)),
        "qkv.bias": (Shard(0, 3), Shard(0, 3)),
        "out.weight": (Shard(1), Shard(0, 2)),
        "out.bias": (R, Shard(0)),
    },
}


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.qkv = nn.Linear(4, 24)
        self.out = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()


def gradients(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for name, parameter in Net().named_parameters()
    }


def placed(mesh: str, seed: int = 0) -> PlacedModule:
    return place_by_hand(Net(seed), mesh, WAYS[mesh])


@pytest.mark.parametrize("mesh", WAYS)
def test_pieces_are_those_of_the_serial_parameters_and_each_has_one_owner(mesh: str) -> None:
    serial = dict(Net().named_parameters())
    parallel = placed(mesh)
    covered = {name: torch.zeros(parameter.shape) for name, parameter in serial.items()}
    for shard in parallel.shards():
        assert shard.shape == serial[shard.name].shape
        assert sum(patch.whole.size for patch in shard.patches) == shard.tensor.numel()
        for patch in shard.patches:
            assert torch.equal(shard.tensor[patch.local.index], serial[shard.name][patch.whole.index])
            covered[shard.name][patch.whole.index] += shard.owner
    assert all(bool((count == 1).all()) for count in covered.values())


@pytest.mark.parametrize("mesh", WAYS)
def test_whole_states_go_in_and_out(mesh: str) -> None:
    parallel, other = placed(mesh), Net(7).state_dict()
    parallel.load_full_state_dict(other)
    assert all(torch.equal(tensor, other[name]) for name, tensor in parallel.full_state_dict().items())


@pytest.mark.parametrize("mesh", WAYS)
def test_the_norm_counts_every_element_once(mesh: str) -> None:
    serial, parallel = Net(), placed(mesh)
    whole = gradients()
    for name, parameter in serial.named_parameters():
        parameter.grad = whole[name].clone()
    give_gradients(parallel, whole)
    norm = nn.utils.clip_grad_norm_(serial.parameters(), 0.5)
    assert norm > 0.5
    torch.testing.assert_close(parallel.clip_grad_norm_(0.5).double(), norm, rtol=1e-6, atol=0)
    for shard in parallel.shards():
        expected = serial.get_parameter(shard.name).grad
        assert shard.tensor.grad is not None and expected is not None
        for patch in shard.patches:
            mine, theirs = shard.tensor.grad[patch.local.index], expected[patch.whole.index]
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mesh", WAYS)
def test_optimizers_update_pieces_as_they_update_the_whole(mesh: str) -> None:
    serial, parallel = Net(), placed(mesh)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1) for module in (serial, parallel)]
    for number in range(2):
        whole = gradients(number)
        for name, parameter in serial.named_parameters():
            parameter.grad = whole[name].clone()
        give_gradients(parallel, whole)
        for optimizer in optimizers:
            optimizer.step()
    for name, tensor in parallel.full_state_dict().items():
        torch.testing.assert_close(tensor, serial.state_dict()[name], rtol=1e-12, atol=0, msg=name)


def test_the_users_module_is_left_as_it_was() -> None:
    user = Net()
    before = copy.deepcopy(user.state_dict())
    parallel = place_by_hand(user, "tp=2", WAYS["tp=2"])
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in user.state_dict().items())
