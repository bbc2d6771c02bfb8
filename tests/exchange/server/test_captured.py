"""A shard for a snapshot, of a server that is asked for it before it knows that it has it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from paceline.exchange.job import DenseTable, Job
from paceline.exchange.server.keeper import Keeper
from paceline.exchange.server.outlet import Outlet
from paceline.exchange.shard.shard import Shard
from paceline.exchange.view import Address, View

JOB = Job((DenseTable("w", (4,)),), shards=1)
BEFORE = View(1, {2: Address()}, ((2,),))
AFTER = View(2, {1: Address(), 2: Address()}, ((1,),))


def no_outlet(*_: object) -> Outlet:
    raise AssertionError("nobody comes after a server that is alone")


@contextmanager
def asked(epoch: int) -> Iterator[tuple[Keeper, Future[int | None]]]:
    """A server that is asked for shard 0 in an epoch, while it goes by the view `BEFORE`."""
    keeper = Keeper(JOB, 1, outlet=no_outlet, synced=lambda _: None, trusted=lambda: True, applied=lambda records: None)
    keeper.adopt(BEFORE, {})
    with ThreadPoolExecutor(1) as threads:
        yield keeper, threads.submit(keeper.captured, 0, 0, epoch, lambda shard: shard.number)
        keeper.close()


def test_it_waits_for_the_view_by_which_it_was_asked() -> None:
    with asked(2) as (keeper, found):
        assert not found.done()
        keeper.adopt(AFTER, {0: Shard(JOB, 0)})
        assert found.result(10) == 0


def test_in_that_view_it_says_at_once_that_others_have_it() -> None:
    with asked(1) as (_, found):
        assert found.result(10) is None


def test_it_waits_no_longer_than_it_serves() -> None:
    with asked(2) as (keeper, found):
        keeper.close()
        assert found.result(10) is None
