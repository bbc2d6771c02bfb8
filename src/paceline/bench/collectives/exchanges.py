"""The collectives that `paceline bench collectives` measures: how each is called, and how much of memory it must touch.

A size is the bytes of the larger of the tensors that a rank hands to the collective, as NCCL's own tests count: the
vector of an all-reduce or a broadcast, the whole sum that goes into a reduce-scatter, everything that comes out of an
all-gather, both sides of an all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

DTYPE = torch.float32


class Kind(StrEnum):
    """A collective."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


@dataclass(frozen=True)
class Exchange:
    """A collective of one size among some ranks; elements are 32-bit floating-point numbers.

    Attributes:
        kind: which collective.
        size: in bytes; a multiple of `ranks` elements.
        ranks: how many take part.
    """

    kind: Kind
    size: int
    ranks: int

    @property
    def _elements(self) -> int:
        return self.size // DTYPE.itemsize

    @property
    def given(self) -> int:
        """Elements of the tensor that a rank gives."""
        return self._elements // self.ranks if self.kind is Kind.ALL_GATHER else self._elements

    @property
    def taken(self) -> int:
        """Elements of the tensor that a rank gets; 0 where what it gave is overwritten."""
        match self.kind:
            case Kind.ALL_REDUCE | Kind.BROADCAST:
                return 0
            case Kind.REDUCE_SCATTER:
                return self._elements // self.ranks
            case Kind.ALL_GATHER | Kind.ALL_TO_ALL:
                return self._elements

    @property
    def bound(self) -> int:
        """Bytes whose copy touches as much memory as a rank must that reads its peers' tensors where they lie.

        A copy of n bytes reads n and writes n. Of N bytes, among P ranks, the rank that has most to do

        - all-reduce: reads its part of everybody's vector (N), writes the sum into everybody's (N): a copy of N;
        - reduce-scatter: reads its part of everybody's vector (N), writes the sum (N/P): of (N + N/P) / 2;
        - all-gather and all-to-all: reads everybody's part, its own too (N), writes all of them (N): of N;
        - broadcast: reads the root's vector (N), writes its own (N): of N.
        """
        if self.kind is Kind.REDUCE_SCATTER:
            return (self.size + self.size // self.ranks) // 2
        return self.size

    def call(self, group: dist.ProcessGroup, given: Tensor, taken: Tensor) -> Callable[[], object]:
        """Return what runs the collective on two tensors of this rank, `given` and `taken` elements long."""
        match self.kind:
            case Kind.ALL_REDUCE:
                return lambda: dist.all_reduce(given, group=group)
            case Kind.REDUCE_SCATTER:
                return lambda: dist.reduce_scatter_single(taken, given, group=group)
            case Kind.ALL_GATHER:
                return lambda: dist.all_gather_single(taken, given, group=group)
            case Kind.ALL_TO_ALL:
                return lambda: dist.all_to_all_single(taken, given, group=group)
            case Kind.BROADCAST:
                return lambda: dist.broadcast(given, 0, group=group)

    def example(self, rank: int) -> Tensor:
        """Return what a rank may give to see whether the collective is right: small whole numbers, exact in any sum."""
        return (torch.arange(self.given, dtype=torch.int32).remainder_(13) + rank).to(DTYPE)

    def result(self, rank: int, given: Iterable[Tensor]) -> Tensor:
        """Return what a rank must have in the end, from what all ranks gave."""
        match self.kind:
            case Kind.ALL_REDUCE:
                return reduce(torch.add, given)
            case Kind.REDUCE_SCATTER:
                return reduce(torch.add, (x.chunk(self.ranks)[rank] for x in given))
            case Kind.ALL_GATHER:
                return torch.cat(list(given))
            case Kind.ALL_TO_ALL:
                return torch.cat([x.chunk(self.ranks)[rank] for x in given])
            case Kind.BROADCAST:
                return next(iter(given))
