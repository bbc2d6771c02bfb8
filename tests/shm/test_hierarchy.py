"""Groups that span hosts: what calls give, in which order they run, and what becomes of them when a part fails."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

from paceline.shm import BACKEND
from tests.ranks import ranks
from tests.shm.calls import Place
from tests.shm.implementations import Implementation, gloo_can
from tests.shm.messages import FromAny
from tests.shm.patience import limit_patience
from tests.shm.program import ANYTHING, draw, execute
from tests.shm.spanning import (
    Job,
    call_everything,
    faults,
    no_namespaces,
    pretend,
    run,
    two_namespaces,
    until_one_is_killed,
)

pytestmark = pytest.mark.usefixtures("native_part")

# The host of each rank: hosts with as many ranks, one with a rank more, and ranks that are not neighbours.
LAYOUTS = ("aabb", "abba", "aaab", "abac")


def _backend_of(group):
    return group._get_backend(torch.device("cpu"))


def _can(call):
    return not isinstance(call, FromAny) or gloo_can(call)  # messages go through Gloo


def _place(group):
    if isinstance(_backend_of(group), dist.ProcessGroupGloo):
        return Implementation.GLOO.place(group)  # no two of its ranks share a host
    return Place(group, dist.get_rank(group), dist.get_world_size(group), can=_can)


@pytest.mark.parametrize("hosts", LAYOUTS)
@ranks(4, backend="gloo")
def test_programs(world, hosts):
    pretend(hosts[world.rank])
    for seed in range(2):
        program = draw(seed, world.size, ANYTHING)
        under_test, reference = {}, {}
        for n, members in enumerate(program.groups):
            ours, gloos = dist.new_group(list(members), backend=BACKEND), dist.new_group(list(members), backend="gloo")
            if world.rank in members:
                under_test[n], reference[n] = _place(ours), Implementation.GLOO.place(gloos)
        reductions = execute(program, world.rank, under_test, reference)
        digests = [None] * world.size
        dist.all_gather_object(digests, [hashlib.sha256(one).hexdigest() for one in reductions])
        assert all(one == digests[0] for one in digests), f"seed {seed}: all-reduces differ in their bits between ranks"


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
@ranks(4, backend="gloo")
def test_large_sums_that_do_not_divide(world, hosts):
    pretend(hosts[world.rank])
    group = dist.new_group(backend=BACKEND)
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        ours = (torch.arange(100_003) % 7 * (world.rank + 1)).to(dtype)
        expected = (torch.arange(100_003) % 7 * 10).to(dtype)
        dist.all_reduce(ours, group=group)
        assert torch.equal(ours, expected), dtype


@ranks(4, backend="gloo")
def test_ddp(world):
    pretend("aabb"[world.rank])
    gradients = []
    for group in (dist.new_group(backend=BACKEND), dist.new_group(backend="gloo")):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(300, 301), torch.nn.Tanh(), torch.nn.Linear(301, 3)).double()
        parallel = torch.nn.parallel.DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.1)
        torch.manual_seed(world.rank)
        parallel(torch.randn(5, 300).double()).square().mean().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@ranks(4, backend="gloo")
def test_callbacks_may_wait_for_later_calls(world):
    pretend("aabb"[world.rank])
    group = dist.new_group(backend=BACKEND)
    first, second = torch.ones(3), torch.ones(3)

    def twice(future):
        return future.value()[0] + dist.all_reduce(second, group=group, async_op=True).get_future().wait()[0]

    result = dist.all_reduce(first, group=group, async_op=True).get_future().then(twice).wait()
    assert result.tolist() == [8, 8, 8]


@ranks(4, backend="gloo")
def test_what_is_queued_runs_before_what_is_called(world):
    pretend("abba"[world.rank])
    group = dist.new_group(backend=BACKEND)
    tensor = torch.full((50_000,), float(world.rank))
    works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(3)]
    dist.broadcast(tensor, 3, group=group)
    assert all(work.is_completed() for work in works)
    assert tensor.eq(6 * 4 * 4).all()


@ranks(3, backend="gloo")
def test_parameters_and_inference_tensors_are_written(world):
    pretend("aab"[world.rank])
    group = dist.new_group(backend=BACKEND)
    parameter = torch.nn.Parameter(torch.full((4, 5), float(world.rank)))
    with torch.inference_mode():
        frozen = torch.ones(3)
    for asynchronous in (False, True):
        for work in (
            dist.broadcast(parameter, 1, group=group, async_op=asynchronous),
            dist.all_reduce(frozen, group=group, async_op=asynchronous),
        ):
            if work is not None:
                work.wait()
    assert parameter.eq(1).all() and frozen.eq(9).all()


@ranks(3, backend="gloo")
def test_what_cannot_be_is_refused_and_the_group_goes_on(world):
    pretend("aab"[world.rank])
    group = dist.new_group(backend=BACKEND)
    with pytest.raises(RuntimeError, match="bitwise operations take integers"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group=group)
    with pytest.raises(RuntimeError, match="AVG takes floating-point"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG, group=group)
    with pytest.raises(RuntimeError, match="no uint64"):
        dist.all_reduce(torch.ones(2, dtype=torch.uint64), group=group)
    with pytest.raises(RuntimeError, match="alike"):
        _backend_of(group).allgather([[torch.ones(2), torch.ones(3), torch.ones(2)]], [torch.ones(2)]).wait()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [3, 3]


@ranks(4, backend="gloo")
def test_an_aborted_group_says_so_everywhere(world):
    pretend("aabb"[world.rank])
    group = dist.new_group(backend=BACKEND)
    dist.barrier(group)
    if world.rank == 3:
        _backend_of(group).abort()
    with pytest.raises(
        dist.DistBackendError, match="it was aborted" if world.rank == 3 else "all_reduce failed on rank"
    ):
        dist.all_reduce(torch.ones(2), group=group)
    with pytest.raises(dist.DistBackendError, match="the group has ended"):
        dist.all_reduce(torch.ones(2), group=group)


@ranks(3, backend="gloo")
def test_a_rank_that_does_not_come_ends_the_wait(world):
    pretend("aab"[world.rank])
    group = dist.new_group(backend=BACKEND)
    limit_patience(group, 1)
    dist.barrier()  # ranks 0 and 1 are not to wait for each other
    if world.rank < 2:
        with pytest.raises(dist.DistBackendError, match=r"all_reduce failed on rank [01] (between|among)"):
            dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()


@pytest.mark.parametrize(("hosts", "victim"), [("aabb", 2), ("aabb", 3), ("aaab", 1), ("aaab", 3)])
def test_a_killed_rank_frees_all_others(tmp_path, hosts, victim):
    job = Job(store=str(tmp_path / "store"), hosts=hosts)
    assert not faults(run(job, until_one_is_killed, victim), victim)


@pytest.fixture(scope="module")
def namespaces():
    reason = no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    with two_namespaces() as both:
        yield both


def test_two_hosts(namespaces):
    assert run(Job(namespaces=namespaces), call_everything) == ["right"] * 4


@pytest.mark.parametrize("victim", [2, 3])
def test_a_rank_killed_on_the_other_host_frees_all_others(namespaces, victim):
    assert not faults(run(Job(namespaces=namespaces), until_one_is_killed, victim), victim)
