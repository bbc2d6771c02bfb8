"""Sizes of calls and tensors of a captured program, with what they divide along."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from paceline.placement.calls import results
from paceline.planner.dividing import Split, alongs, is_part
from paceline.program.random import is_random
from paceline.program.work import CallWork, Operations, reads, work_of, writes
from paceline.simulator.workload import Along, Amount, Kind, Pass, Work

Alongs = frozenset[Along]


@dataclass(frozen=True)
class Amounts:
    """Reads amounts off a captured program.

    Attributes:
        splits: the program placed along each axis.
        batch: samples in it.
    """

    splits: Mapping[Along, Split]
    batch: int

    def of(self, value: float, along: Alongs) -> Amount:
        """Return an amount, of one sample where it grows with the batch."""
        return Amount(value / self.batch if Along.BATCH in along else value, along)

    def tensor(self, node: Node, index: int = 0) -> Alongs:
        """Return what a result of a node divides along, as it is made; random draws, as they are read."""
        if is_random(node):
            node, index = _reader(node), 0
        whole = results(node)[index]
        assert whole is not None
        return alongs([along for along, split in self.splits.items() if split.divides(node.name, index, whole)])

    def kept(self, node: Node, index: int, nbytes: int) -> Alongs:
        """Return what memory of a result divides along that is kept for the backward pass."""
        if is_random(node):
            return self.tensor(node, index)
        whole = results(node)[index]
        assert whole is not None
        return alongs(
            [along for along, split in self.splits.items() if split.divides_kept(node.name, index, whole, nbytes)]
        )

    def work(self, node: Node, times: int) -> Iterable[Work]:
        """Yield the work of a call that is done so many times."""
        work = work_of(node)
        if work.view:
            return
        when = Pass.BACKWARD if node.meta.get("backward") else Pass.FORWARD
        if work.operations is not None:
            yield self._products(node, work, work.operations, when, times)
            return
        touched: dict[Alongs, float] = defaultdict(float)
        for along, nbytes in self._touched(node):
            touched[along] += nbytes * times
        launches = float(times)
        for along, nbytes in sorted(touched.items(), key=lambda item: -item[1]):
            yield Work(Kind.TOUCH, when, nbytes=self.of(nbytes, along), launches=launches)
            launches = 0.0

    def _products(self, node: Node, work: CallWork, whole: Operations, when: Pass, times: int) -> Work:
        dims: list[set[Along]] = [set() for _ in whole.dims]
        repeated: set[Along] = set()
        for along, split in self.splits.items():
            piece = _largest(split.calls.get(node.name, ()))
            if along is Along.REGION or piece is None or not is_part(piece.flops, whole.flops):
                continue  # regions lie between products
            parts = [is_part(a, b) for a, b in zip(piece.dims, whole.dims, strict=True)]
            if any(parts):
                dims[parts.index(True)].add(along)
            else:
                repeated.add(along)
        if work.kind.value == Kind.ATTENTION.value:
            kind, factor = Kind.ATTENTION, whole.factor / (2 if whole.causal else 1)
        else:
            kind, factor = Kind.PRODUCT, whole.factor
        return Work(
            kind,
            when,
            tuple(self.of(size, frozenset(found)) for size, found in zip(whole.dims, dims, strict=True)),
            self.of(whole.times * times, frozenset(repeated)),
            factor,
            launches=float(times),
        )

    def _touched(self, node: Node) -> Iterable[tuple[Alongs, float]]:
        """Yield the bytes that a call reads and writes, tensor by tensor, with what each divides along."""
        if is_random(node):
            yield self.tensor(node), float(sum(nbytes for _, nbytes in writes(node)))
            return
        whole = [*reads(node), *writes(node)]
        found: list[list[Along]] = [[] for _ in whole]
        for along, split in self.splits.items():
            local = split.calls.get(node.name, ())
            if len(local) == 1:
                pieces = [*reads(local[0]), *writes(local[0])]
                if len(pieces) == len(whole):
                    for mine, (piece, _), (tensor, _) in zip(found, pieces, whole, strict=True):
                        if is_part(piece.numel(), tensor.numel()):
                            mine.append(along)
                    continue
            if local and is_part(sum(map(_bytes, local)), sum(nbytes for _, nbytes in whole)):
                for mine in found:
                    mine.append(along)
        for mine, (_, nbytes) in zip(found, whole, strict=True):
            yield alongs(mine), nbytes


def together(found: Iterable[Amount]) -> tuple[Amount, ...]:
    """Return the sums of amounts that divide alike."""
    sums: dict[Alongs, float] = defaultdict(float)
    for amount in found:
        sums[amount.along] += float(amount.value)
    return tuple(Amount(value, along) for along, value in sums.items() if value)


def merged(found: Iterable[Work]) -> list[Work]:
    """Return work with what touches memory added up, where it is done at the same time and divides alike."""
    sums: dict[tuple[Pass, bool, Alongs], list[Work]] = defaultdict(list)
    rest = []
    for work in found:
        if work.kind is Kind.TOUCH:
            sums[work.when, work.selective, work.nbytes.along].append(work)
        else:
            rest.append(work)
    for (when, selective, along), alike in sums.items():
        nbytes = sum(float(work.nbytes.value) for work in alike)
        launches = sum(work.launches for work in alike)
        rest.append(Work(Kind.TOUCH, when, nbytes=Amount(nbytes, along), selective=selective, launches=launches))
    return rest


def _reader(node: Node) -> Node:
    """Return the call that reads what a node draws, of one result and alike in shape; the node, if there is none.

    Ranks draw the numbers of the whole batch, so that they are those of a single process, and take theirs.
    """
    for user in node.users:
        value = user.meta.get("val")
        if isinstance(value, Tensor) and value.shape == results(node)[0].shape:  # type: ignore[union-attr]  # one tensor
            return user
    return node


def _largest(calls: Iterable[Node]) -> Operations | None:
    found = [work.operations for work in map(work_of, calls) if work.operations is not None]
    return max(found, key=lambda operations: operations.flops, default=None)


def _bytes(node: Node) -> int:
    work = work_of(node)
    return work.read_bytes + work.written_bytes
