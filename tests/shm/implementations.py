"""The implementations of the back-end `shm` that the tests compare, and Gloo, which is what they are compared with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.shm.batches import AllReduceCoalesced, Functional, FunctionalCoalesced
from tests.shm.calls import (
    AllGatherSingle,
    AllReduce,
    AllToAll,
    Call,
    Gather,
    Mode,
    Place,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
)
from tests.shm.messages import FromAny, Messages
from tests.shm.values import Layout, Spec

CHOICE = "PACELINE_SHM"


class Implementation(Enum):
    """What a test runs on. Gloo is there to test the tests."""

    NATIVE = "native"
    PORTABLE = "portable"
    GLOO = "gloo"

    @property
    def backend(self) -> str:
        """Return its name for `torch.distributed`."""
        return "gloo" if self is Implementation.GLOO else "shm"

    def choose(self) -> None:
        """Let this process use it."""
        if self is Implementation.GLOO:
            return
        os.environ[CHOICE] = self.value
        import paceline.shm  # noqa: F401 - registers itself

    def place(self, group: dist.ProcessGroup) -> Place:
        """Return this rank in `group`."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if self is Implementation.GLOO:
            # Some of its works end only when waited for, and have no futures.
            return Place(group, rank, size, (Layout.PLAIN,), (Mode.SYNC, Mode.ASYNC), gloo_can)
        if self is Implementation.PORTABLE:
            return Place(group, rank, size)
        cpu = torch.device("cpu")
        backend = group._get_backend(cpu)
        return Place(
            group,
            rank,
            size,
            tuple(Layout),
            allocate=lambda count, dtype: backend.allocate_tensor(count, dtype=dtype, device=cpu),
        )


# All, or the one that the environment names.
_TESTED = (
    [Implementation(os.environ[CHOICE])] if CHOICE in os.environ else [Implementation.NATIVE, Implementation.PORTABLE]
)
needs_native = pytest.mark.skipif(Implementation.NATIVE not in _TESTED, reason=f"{CHOICE} is set")
every_implementation = pytest.mark.parametrize("implementation", _TESTED, ids=lambda one: one.value)


def gloo_can(call: Call) -> bool:
    """Return whether Gloo makes this call, and rightly."""
    specs = list(_parts(call, Spec))
    if isinstance(call, Messages):
        return True
    if isinstance(call, AllToAll) and len({rows for row in call.rows for rows in row}) > 1:
        return False
    if isinstance(call, FromAny):
        return 0 not in call.spec.shape
    if any(spec.dtype == torch.int16 for spec in specs):
        return False
    if any(spec.shape == () for spec in _parts(_parts(call, AllGatherSingle, ReduceScatterSingle), Spec)):
        return False  # an error for the first, a crash for the second
    if isinstance(call, Functional | FunctionalCoalesced | Gather | Reduce) and any(s.dtype.is_complex for s in specs):
        return False
    reducing = _parts(call, AllReduce, AllReduceCoalesced, Reduce, ReduceScatter, ReduceScatterSingle)
    sums = any(one.op == ReduceOp.SUM for one in reducing)
    return not (sums and any(spec.dtype == torch.bool for spec in specs))  # it adds them as bytes


def _parts(whole: Any, *kinds: type) -> Iterator[Any]:
    """Yield what is of one of these kinds in a call, and in the calls and lists within it."""
    if isinstance(whole, kinds):
        yield whole
    elif isinstance(whole, Iterable) and not isinstance(whole, str):
        for part in whole:
            yield from _parts(part, *kinds)
    elif is_dataclass(whole):
        for field in fields(whole):
            yield from _parts(getattr(whole, field.name), *kinds)
