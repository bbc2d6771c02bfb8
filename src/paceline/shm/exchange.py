"""Exchanges for programs that know early what they will need late: started at once, done when waited for.

Beside the calls of `torch.distributed`, for those who arrange that all ranks start and wait in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from paceline.shm import build


class Started(Protocol):
    """An exchange under way."""

    def wait(self) -> Tensor:
        """Return its result; once."""
        ...


@dataclass(frozen=True)
class Exchange:
    """Exchanges among the ranks of one group, all on this host. Tensors in shared memory are read where they lie."""

    _native: ModuleType
    _backend: Backend
    _group: dist.ProcessGroup

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Exchange | None:
        """Return the exchanges of a group; None if its ranks do not share memory through native code."""
        try:
            backend = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # the group in pure Python is no backend of another
            return None
        return cls(build.native(), backend, group) if backend.name() == "shm" else None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._group.size()

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self._group.rank()

    def fence(self) -> None:
        """Wait until all ranks are here."""
        self._native.fence(self._backend)

    def all_reduce(self, x: Tensor) -> Started:
        """Start the sum of x: [...] over the ranks."""
        started: Started = self._native.all_reduce(self._backend, x)
        return started

    def all_reduce_in_place(self, x: Tensor) -> Started:
        """Start the sum of x: [...], which becomes the sum itself if it lies in shared memory."""
        started: Started = self._native.all_reduce_in_place(self._backend, x)
        return started

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Started:
        """Start the sum of x: [ranks * n1 + ranks * n2 + ...] over the ranks; this one gets its rows: [n1 + n2 + ...].

        `x` holds one tensor after the other, each of as many rows as there are ranks; `sizes`: n1, n2 and so on.
        """
        started: Started = self._native.reduce_scatter(self._backend, x, sizes)
        return started

    def all_gather(self, x: Tensor) -> Started:
        """Start the gathering of x: [n] from every rank: [ranks, n]."""
        started: Started = self._native.all_gather(self._backend, x)
        return started

    def all_to_all(self, x: Tensor) -> Started:
        """Start the exchange of x: [ranks, n]: row i goes to rank i, row j of the result came from rank j."""
        started: Started = self._native.all_to_all(self._backend, x)
        return started

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return room in shared memory for `size` numbers."""
        room: Tensor = self._native.empty(self._backend, size, dtype)
        return room

    def common(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return one tensor: [size] for all ranks together, which all of them make at the same time.

        It lives until the last of them lets go of it.
        """
        where = torch.zeros(1, dtype=torch.long)
        whole: Tensor | None = None
        if self._group.rank() == 0:
            whole, where[0] = self._native.make_common(self._backend, size, dtype)
        dist.broadcast(where, group=self._group, group_src=0)
        if whole is None:
            whole = self._native.open_common(self._backend, int(where), size, dtype)
        return whole

    def is_common(self, x: Tensor) -> bool:
        """Return whether a tensor is a part of one that `common` made."""
        return bool(self._native.is_common(self._backend, x))

    def bytes_in_use(self) -> int:
        """Return how much of its shared memory this process has given out."""
        return int(self._native.bytes_in_use(self._backend))
