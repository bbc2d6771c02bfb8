"""What becomes of the user's module when the only rank of a process takes its tensors over."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from paceline.plan import Mesh, Plan
from paceline.runtime.hollow import Hollow
from paceline.runtime.job.world import World
from paceline.runtime.module import parallelize
from tests.ranks import ranks
from tests.runtime.steps import BATCH, Stack, batch


def kept_bytes() -> int:
    """Bytes of all tensors that are alive in this process, each memory once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@ranks(mesh="fsdp=2", backend="gloo")  # where ranks share memory they share whole parameters: see test_shared.py
def test_sharded_parameters_are_given_back(mesh: Mesh, world: World) -> None:
    module, reference = Stack(), Stack()
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    before = kept_bytes()
    parallel = parallelize(module, batch(), Plan(mesh))
    shards = sum(p.numel() * p.element_size() for p in parallel.parameters())
    assert shards == whole // 2
    assert kept_bytes() - before < -whole // 3, "the whole parameters are gone, their shards are there"
    assert all(p.isnan().all() for p in module.parameters())
    assert module(*batch()).isnan(), "used by mistake, it shows"
    # Another shape, and evaluation, are captured from the hollow module.
    (x,) = batch()
    for example in (x, x[: BATCH // 2]):
        parallel.zero_grad()
        reference.zero_grad()
        loss, expected = parallel(example), reference(example)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
    assert not parallel.eval()(x).requires_grad
    for name, tensor in parallel.full_state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name])


@ranks(mesh="dp=2")
def test_whole_parameters_are_shared(mesh: Mesh, world: World) -> None:
    module = Stack()
    before = kept_bytes()
    parallel = parallelize(module, batch(), Plan(mesh))
    assert kept_bytes() - before < 4096
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel(*batch()).backward()
    optimizer.step()
    for (name, mine), theirs in zip(parallel.named_parameters(), module.parameters(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr(), name
        assert mine.grad is not None and theirs.grad is None


def test_in_process_ranks_leave_the_module_alone() -> None:
    module = Stack()
    before = copy.deepcopy(module.state_dict())
    parallel = parallelize(module, batch(), Plan(Mesh.parse("fsdp=2")), devices=["cpu"])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel(*batch()).backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hollow_parameter_keeps_its_layout_for_captures(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=dtype).t())
    kept_elsewhere = parameter.detach()
    hollow = Hollow()
    hollow.release(parameter)
    assert parameter.shape == (4, 3) and parameter.isnan().all()
    assert kept_elsewhere.sum() == 12, "who else holds the memory still has it"
    with hollow.shaped():
        assert parameter.stride() == (1, 4)
        assert parameter.untyped_storage().nbytes() == 0
    assert parameter.isnan().all() and parameter.requires_grad
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        parameter.add_(1.0)


def test_whole_numbers_are_never_hollow() -> None:
    parameter = nn.Parameter(torch.arange(3), requires_grad=False)
    Hollow().release(parameter)
    assert parameter.tolist() == [0, 1, 2]
