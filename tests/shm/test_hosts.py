"""Who shares a host, as ranks tell each other."""

from __future__ import annotations

import multiprocessing
import os
import threading
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from paceline.errors import LaunchError
from paceline.shm.hosts import Layout, grouped, identity, layout
from tests.ranks import PRELOAD
from tests.shm.spanning import Namespace, no_namespaces, two_namespaces


def test_ranks_are_grouped_in_the_order_of_their_first():
    view = grouped(["b", "a", "b", "c", "a"], rank=4)
    assert view.hosts == ((0, 2), (1, 4), (3,))
    assert (view.size, view.host, view.local_ranks, view.index, view.leader) == (5, 1, (1, 4), 1, 1)
    assert not view.even


@pytest.mark.parametrize(
    ("names", "rank", "peers"), [("abab", 2, (2, 3)), ("abab", 3, (2, 3)), ("aaab", 0, (0, 3)), ("aaab", 2, ())]
)
def test_peers_between_hosts(names, rank, peers):
    assert grouped(names, rank).peers_between == peers


@pytest.mark.parametrize(
    ("hosts", "rank"),
    [(((0, 1), (1,)), 0), (((0,), (2,)), 0), (((0, 1),), 2), (((0,), ()), 0), (((1, 0),), 0), (((1,), (0,)), 0)],
)
def test_what_cannot_be_is_refused(hosts, rank):
    with pytest.raises(LaunchError, match="hosts"):
        Layout(hosts, rank)


def test_all_ranks_agree():
    store, views = dist.HashStore(), {}

    def be(rank, host):
        views[rank] = layout(store, rank, 3, host)

    threads = [threading.Thread(target=be, args=(rank, host)) for rank, host in enumerate("xyx")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {view.hosts for view in views.values()} == {((0, 2), (1,))}
    assert [views[rank].rank for rank in range(3)] == [0, 1, 2]


def test_absent_ranks_are_named():
    with pytest.raises(LaunchError, match=r"ranks \[0, 2\] of a group of 3 did not say"):
        layout(dist.HashStore(), 1, 3, "x", timeout=timedelta(milliseconds=50))


def test_a_rank_outside_of_the_group_and_a_host_without_name_are_refused():
    with pytest.raises(LaunchError, match="rank 3 of 3"):
        layout(dist.HashStore(), 3, 3, "x")
    with pytest.raises(LaunchError, match="name"):
        layout(dist.HashStore(), 0, 1, "")


def test_by_default_the_host_is_this_one():
    assert layout(dist.HashStore(), 0, 1).hosts == ((0,),)


def _identity_from(namespace: Namespace | None = None) -> str:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell_identity, args=(theirs, namespace))
    process.start()
    theirs.close()
    try:
        return ours.recv()  # EOFError if it fails, whose reason it prints
    finally:
        process.join()


def _tell_identity(pipe: Connection, namespace: Namespace | None) -> None:
    if namespace is not None:
        namespace.enter()
    pipe.send(identity())


def test_processes_of_one_host_have_one_identity_and_other_namespaces_another():
    assert _identity_from() == identity()
    reason = no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    with two_namespaces() as (a, b):
        theirs = [_identity_from(one) for one in (a, b)]
    assert len({*theirs, identity()}) == 3
    assert f"uid:{os.geteuid()}" in theirs[0]
