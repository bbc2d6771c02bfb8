"""Ranks that call different things: all are told who calls what, and the group is not used again."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.shm.implementations import every_implementation

_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

# What each of two ranks calls, and patterns of what all must be told, without capitals and underscores.
CASES = {
    "shapes": (
        lambda group, rank: dist.all_reduce(torch.ones(3 + rank), group=group),
        ["allreduce", r"\b(3|12)\b", r"\b(4|16)\b"],
    ),
    "sizes beyond staging": (
        lambda group, rank: dist.all_reduce(torch.ones(3_000_000 + rank), group=group),
        ["allreduce", r"\b(3|12)000000\b", r"\b(3000001|12000004)\b"],
    ),
    "one is empty": (
        lambda group, rank: dist.all_reduce(torch.ones(4 * rank), group=group),
        ["allreduce"],
    ),
    "types": (
        lambda group, rank: dist.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[rank]), group=group),
        ["allreduce", "float", "int"],
    ),
    "operations": (
        lambda group, rank: dist.all_reduce(torch.ones(4), (_SUM, _MAX)[rank], group),
        ["allreduce", "sum", "max"],
    ),
    "roots": (
        lambda group, rank: dist.broadcast(torch.ones(4), rank, group),
        ["broadcast"],
    ),
    "kinds": (
        lambda group, rank: (
            dist.all_reduce(torch.ones(4), group=group) if rank else dist.broadcast(torch.ones(4), 0, group)
        ),
        ["allreduce", "broadcast"],
    ),
    "a barrier": (
        lambda group, rank: (
            dist.all_gather_single(torch.ones(8), torch.ones(4), group) if rank else dist.barrier(group)
        ),
        ["allgather", "barrier"],
    ),
}


def _told(call, *args, **options):
    """Return what a call is answered with, without capitals and underscores; nothing where it goes well."""
    try:
        call(*args, **options)
    except dist.DistBackendError as error:
        return str(error).lower().replace("_", "")
    return ""


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@every_implementation
@ranks(2, backend="gloo")
def test_each_rank_is_told_who_calls_what(world, implementation, asynchronous):
    implementation.choose()
    for name, (call, words) in CASES.items():
        group = dist.new_group([0, 1], backend=implementation.backend)
        dist.all_reduce(torch.ones(1), group=group)
        if asynchronous:
            dist.all_reduce(torch.ones(100_000), group=group, async_op=True)  # so that the next one finds a queue
        text = _told(call, group, world.rank)
        for word in ("rank 0", "rank 1", *words):
            assert re.search(word, text), f"{name}: no '{word}' in: {text}"
        assert _told(dist.all_reduce, torch.ones(1), group=group), f"{name}: the group is used again"
        dist.destroy_process_group(group)


@every_implementation
@ranks(2, backend="gloo")
def test_splits_that_differ_are_told_at_the_latest_with_the_next_call(world, implementation):
    implementation.choose()
    group = dist.new_group([0, 1], backend=implementation.backend)
    wants = [2 + world.rank, 2]  # from rank 0, which gives 2 to each
    output = torch.ones(sum(wants))
    text = _told(dist.all_to_all_single, output, torch.ones(4), wants, [2, 2], group)
    if world.rank == 1:
        assert "rank 0" in text and re.search(r"\b(2|8)\b", text) and re.search(r"\b(3|12)\b", text), text
    dist.barrier()
    again = _told(dist.all_reduce, torch.ones(1), group=group)
    assert "rank 1" in text + again, f"{text}; {again}"


@every_implementation
@ranks(3, backend="gloo")
def test_the_one_that_differs_is_named_among_three(world, implementation):
    implementation.choose()
    group = dist.new_group([0, 1, 2], backend=implementation.backend)
    text = _told(dist.all_reduce, torch.ones(5 if world.rank == 1 else 4), group=group)
    assert "rank 1" in text and re.search(r"\b(4|16)\b", text) and re.search(r"\b(5|20)\b", text)


@every_implementation
@ranks(2, backend="gloo")
def test_a_message_of_another_size_is_an_error_where_it_arrives(world, implementation):
    implementation.choose()
    group = dist.new_group([0, 1], backend=implementation.backend)
    if world.rank == 0:
        work = dist.isend(torch.ones(4), 1, group)
        dist.barrier()
        del work
    else:
        text = _told(dist.recv, torch.ones(3), 0, group)
        assert "rank 0" in text and re.search(r"\b(4|16)\b", text) and re.search(r"\b(3|12)\b", text)
        dist.barrier()


@every_implementation
@ranks(2, backend="gloo")
def test_different_collectives_work_by_work(world, implementation):
    """Works already queued end with the same error, and none of them waits for ever."""
    implementation.choose()
    group = dist.new_group([0, 1], backend=implementation.backend)
    works = [dist.all_reduce(torch.ones(1000 + world.rank * (n == 2)), group=group, async_op=True) for n in range(6)]
    for work in works[:2]:
        work.wait()
    for work in works[2:]:
        with pytest.raises(dist.DistBackendError):
            work.wait()
