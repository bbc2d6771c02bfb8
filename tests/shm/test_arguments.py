"""Arguments of every kind: what is taken, and what is refused before anything happens, so that the group goes on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.ranks import ranks
from tests.shm.implementations import Implementation, every_implementation, needs_native


def _group(world, implementation):
    implementation.choose()
    return dist.new_group(list(range(world.size)), backend=implementation.backend)


def _ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


# What both of two ranks call.
REFUSED = {
    "bits of floats": lambda group, rank: dist.all_reduce(_ones(3), ReduceOp.BAND, group),
    "a mean of integers": lambda group, rank: dist.all_reduce(_ones(3, dtype=torch.int32), ReduceOp.AVG, group),
    "a list too short": lambda group, rank: dist.all_gather([_ones(3)], _ones(3), group),
    "an output too small": lambda group, rank: dist.all_gather_single(_ones(5), _ones(3), group),
    "an input too small": lambda group, rank: dist.reduce_scatter_single(_ones(3), _ones(5), group=group),
    "another type": lambda group, rank: dist.all_gather_single(_ones(6, dtype=torch.int32), _ones(3), group),
    "splits that do not add up": lambda group, rank: dist.all_to_all_single(_ones(4), _ones(4), [1, 2], [2, 2], group),
    "an odd number for two": lambda group, rank: dist.all_to_all_single(_ones(3), _ones(3), group=group),
    "a message to nobody": lambda group, rank: group.send([_ones(3)], 2, 0),
}


@every_implementation
@ranks(2, backend="gloo")
def test_what_cannot_be_is_refused_and_the_group_goes_on(world, implementation):
    group = _group(world, implementation)
    for name, call in REFUSED.items():
        with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError)) as caught:
            call(group, world.rank)
            pytest.fail(f"{name} is not refused")
        assert not isinstance(caught.value, dist.DistBackendError), f"{name}: {caught.value}"
        x = _ones(3)
        dist.all_reduce(x, group=group)
        assert x.eq(2).all(), name


@every_implementation
@ranks(2, backend="gloo")
def test_a_factor_is_applied_or_refused(world, implementation):
    group, x = _group(world, implementation), _ones(3)
    try:
        dist.all_reduce(x, dist._make_nccl_premul_sum(2.0), group)
    except (RuntimeError, ValueError):
        x *= 4
    assert x.eq(4).all()


@every_implementation
@ranks(2, backend="gloo")
def test_parameters_and_inference_tensors_are_written(world, implementation):
    group = _group(world, implementation)
    parameter = torch.nn.Parameter(torch.full((4, 5), float(world.rank)))
    strided = torch.nn.Parameter(torch.full((4, 5), float(world.rank)).t())
    with torch.inference_mode():
        frozen, turned = torch.ones(3), torch.ones(3, 4).t()
    for asynchronous in (False, True):
        works = [
            dist.broadcast(parameter, 1, group, asynchronous),
            dist.broadcast(strided, 1, group, asynchronous),
            dist.all_reduce(frozen, group=group, async_op=asynchronous),
            dist.all_reduce(turned, group=group, async_op=asynchronous),
        ]
        for work in works:
            if work is not None:
                work.wait()
    assert parameter.eq(1).all() and strided.eq(1).all() and frozen.eq(4).all() and turned.eq(4).all()
    assert parameter.requires_grad and parameter.grad_fn is None


@every_implementation
@ranks(2, backend="gloo")
def test_inputs_may_be_expanded_or_require_gradients(world, implementation):
    group = _group(world, implementation)
    thin = torch.full((1, 3), world.rank + 1.0, requires_grad=True)
    output = torch.empty(8, 3)
    dist.all_gather_single(output, thin.expand(4, 3), group)
    assert output.tolist() == [[1.0] * 3] * 4 + [[2.0] * 3] * 4
    part = torch.empty(2, 3)
    dist.reduce_scatter_single(part, thin.expand(4, 3), group=group)
    assert part.eq(3).all()


@needs_native
@pytest.mark.usefixtures("native_part")
@ranks(3, backend="gloo")
def test_gathered_tensors_may_differ_in_size(world):
    group, sizes = _group(world, Implementation.NATIVE), (0, 7, 300_000)
    outputs = [torch.zeros(size) for size in sizes]
    dist.all_gather(outputs, torch.full((sizes[world.rank],), float(world.rank)), group)
    for rank, output in enumerate(outputs):
        assert output.eq(rank).all()


@every_implementation
@ranks(2, backend="gloo")
def test_the_same_tensor_is_input_and_output(world, implementation):
    group = _group(world, implementation)
    x = torch.arange(200_000.0) + world.rank
    dist.all_gather_single(x, x[world.rank * 100_000 :][:100_000], group)
    assert torch.equal(x, torch.cat([torch.arange(100_000.0), torch.arange(100_000.0, 200_000) + 1]))
    part = x[world.rank * 100_000 :][:100_000]
    want = 2 * part.clone()
    dist.reduce_scatter_single(part, x, group=group)
    assert torch.equal(part, want)


@every_implementation
@ranks(2, backend="gloo")
def test_special_values_of_floats(world, implementation):
    group = _group(world, implementation)
    inf, nan = float("inf"), float("nan")
    mine = torch.tensor([[inf, -inf, nan, 1.0, 3e38], [inf, inf, 1.0, nan, 3e38]][world.rank])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = mine.to(dtype)
        dist.all_reduce(x, group=group)
        want = torch.tensor([inf, nan, nan, nan, 6e38], dtype=torch.float64).to(dtype)
        assert torch.equal(x.isnan(), want.isnan()) and x[0] == inf, dtype
        assert dtype == torch.float64 or x[4].isinf()


@every_implementation
@ranks(3, backend="gloo")
def test_subnormal_numbers_stay(world, implementation):
    group = _group(world, implementation)
    for dtype in (torch.float32, torch.float64):
        tiny = torch.finfo(dtype).tiny / 4
        x = torch.full((1000,), tiny, dtype=dtype)
        dist.all_reduce(x, group=group)
        assert x.eq(torch.tensor(tiny, dtype=dtype) * 3).all() and x[0] > 0
