"""Random programs: groups, and batches of calls on them, the same on all ranks because drawn from one seed.

    program = draw(seed=7, ranks=3, menu=ANYTHING)
    execute(program, rank, under_test, reference)

A batch starts calls in order, some waited for at once, and then waits for the others in an order of each rank's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp

from tests.shm.batches import (
    AllGatherCoalesced,
    AllReduceCoalesced,
    Coalesced,
    Functional,
    FunctionalCoalesced,
    ObjectKind,
    Objects,
)
from tests.shm.calls import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Mode,
    Op,
    Place,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    differences,
)
from tests.shm.messages import FromAny, How, Message, Messages, ObjectMessage
from tests.shm.values import DTYPES, FLOATS, INTEGERS, Spec, bits

_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


@dataclass(frozen=True)
class Menu:
    """What programs are drawn from.

    Attributes:
        counts: how many elements a tensor may have, each with its weight.
        dtypes: the types.
    """

    counts: Mapping[int, float]
    dtypes: tuple[torch.dtype, ...] = DTYPES


SMALL = Menu({0: 1, 1: 4, 3: 4, 16: 4, 17: 4, 63: 3, 256: 3, 1001: 2, 5000: 1})
ANYTHING = Menu({**SMALL.counts, 40_000: 2, 65_537: 1, 300_001: 0.7, 1_500_000: 0.4})


@dataclass(frozen=True)
class Step:
    """A call, on which group, and how."""

    group: int
    call: Call
    mode: Mode


@dataclass(frozen=True)
class Program:
    """Attributes: `groups` as ranks, in the order of their creation; `batches` of steps; `seed` of the waiting."""

    groups: tuple[tuple[int, ...], ...]
    batches: tuple[tuple[Step, ...], ...]
    seed: int


def draw(seed: int, ranks: int, menu: Menu, batches: int = 12, groups: int = 3) -> Program:
    """Return a program for `ranks` ranks: `groups` random groups beside that of all."""
    random_ = random.Random(seed)
    chosen = [tuple(range(ranks))]
    for _ in range(groups):
        chosen.append(tuple(sorted(random_.sample(range(ranks), random_.randint(1, ranks)))))
    random_.shuffle(chosen)
    return draw_on(seed, tuple(chosen), menu, batches)


def draw_on(seed: int, groups: tuple[tuple[int, ...], ...], menu: Menu, batches: int) -> Program:
    """Return a program on these groups."""
    random_ = random.Random(seed)
    pick = Picker(random_, menu)
    drawn = []
    for _ in range(batches):
        at = [random_.randrange(len(groups)) for _ in range(random_.choice((1, 1, 2, 4, 6)))]
        drawn.append(tuple(Step(n, pick.call(len(groups[n])), random_.choice(list(Mode))) for n in at))
    return Program(groups, tuple(drawn), seed)


class Picker:
    """Draws calls."""

    def __init__(self, draw: random.Random, menu: Menu) -> None:
        self._draw = draw
        self._menu = menu
        self._tag = 1000
        self._counts = list(menu.counts), list(menu.counts.values())

    def call(self, size: int) -> Call:
        """Return a call for a group of `size` ranks."""
        collectives = (self._reducing, self._copying, self._to_all, self._several, self._functional, self._other)
        weights = (5, 6, 2, 2, 2, 1.5)
        if size == 1:
            return self._draw.choice(collectives)(size)
        kinds: tuple[Callable[[int], Call], ...] = (*collectives, self._messages)
        return self._draw.choices(kinds, (*weights, 4))[0](size)

    def _reducing(self, size: int) -> Call:
        op = self._op()
        spec, kind = self._spec(op), self._draw.randrange(5)
        if kind == 0:
            return Reduce(spec, op, self._draw.randrange(size))
        if kind == 1:
            return ReduceScatter(spec, op)
        return ReduceScatterSingle(spec, op) if kind == 2 else AllReduce(spec, op)

    def _copying(self, size: int) -> Call:
        spec, root = self._spec(), self._draw.randrange(size)
        calls = (AllGather(spec), AllGatherSingle(spec), Broadcast(spec, root), Gather(spec, root), Scatter(spec, root))
        return self._draw.choice(calls)

    def _to_all(self, size: int) -> Call:
        split = self._draw.random() < 0.7
        count, width = self._draw.randint(0, 9), self._draw.choice((1, 3, 2000))
        rows = tuple(tuple(self._draw.randint(0, 9) if split else count for _ in range(size)) for _ in range(size))
        spec = Spec((0, width), self._dtype(), self._seed())
        return AllToAll(spec, rows) if self._draw.random() < 0.4 else AllToAllSingle(spec, rows, split)

    def _several(self, size: int) -> Call:
        op, count = self._op(), self._draw.randint(1, 4)
        functional = self._draw.random() < 0.4
        dtype = self._dtype_for(op)
        reducing = [self._spec(op, dtype, small=True, scalar=not functional) for _ in range(count)]
        copying = [self._spec(None, dtype, small=True, scalar=not functional) for _ in range(count)]
        single: tuple[tuple[AllReduce, ...] | tuple[ReduceScatterSingle, ...] | tuple[AllGatherSingle, ...], ...] = (
            tuple(AllReduce(spec, op) for spec in reducing),
            tuple(ReduceScatterSingle(spec, op) for spec in reducing),
            tuple(AllGatherSingle(spec) for spec in copying),
        )
        if functional:
            return FunctionalCoalesced(self._draw.choice(single))
        return self._draw.choice(
            (
                AllReduceCoalesced(tuple(reducing), op),
                AllGatherCoalesced(tuple(copying)),
                Coalesced(self._draw.choice(single)),
            )
        )

    def _functional(self, size: int) -> Call:
        op = self._op()
        reducing, copying = self._spec(op, scalar=False), self._spec(scalar=False)
        rows = tuple(tuple(self._draw.randint(0, 9) for _ in range(size)) for _ in range(size))
        return Functional(
            self._draw.choice(
                (
                    AllReduce(reducing, op),
                    ReduceScatterSingle(reducing, op),
                    AllGatherSingle(copying),
                    AllToAllSingle(Spec((0, 3), self._dtype(), self._seed()), rows, True),
                    Broadcast(copying, self._draw.randrange(size)),
                )
            )
        )

    def _other(self, size: int) -> Call:
        if self._draw.random() < 0.5:
            return Barrier()
        return Objects(self._draw.choice(list(ObjectKind)), self._seed(), self._draw.randrange(size))

    def _messages(self, size: int) -> Call:
        one, other = self._draw.sample(range(size), 2)
        kind = self._draw.random()
        if kind < 0.08:
            return ObjectMessage(one, other, self._seed())
        if kind < 0.3:
            self._tag += 1
            return FromAny(self._spec(), one, self._draw.randint(1, 2), self._tag)
        messages = []
        for _ in range(self._draw.randint(1, 8)):
            source, target = self._draw.sample(range(size), 2)
            messages.append(Message(source, target, self._draw.randint(0, 2), self._spec()))
        return Messages(tuple(messages), self._draw.choice(list(How)), self._seed())

    def _seed(self) -> int:
        return self._draw.randrange(1 << 40)

    def _dtype(self) -> torch.dtype:
        return self._draw.choice(self._menu.dtypes)

    def _op(self) -> Op:
        return self._draw.choice((ReduceOp.SUM, ReduceOp.SUM, ReduceOp.AVG, *_ARITHMETIC, *_BITWISE))

    def _dtype_for(self, op: Op | None) -> torch.dtype:
        allowed: Sequence[torch.dtype] = DTYPES
        if op == ReduceOp.AVG:
            allowed = FLOATS
        elif op in _BITWISE:
            allowed = (*INTEGERS, torch.bool)
        elif op is not None and op != ReduceOp.SUM:
            allowed = [dtype for dtype in DTYPES if not dtype.is_complex]
        return self._draw.choice([dtype for dtype in allowed if dtype in self._menu.dtypes])

    def _spec(
        self, op: Op | None = None, dtype: torch.dtype | None = None, small: bool = False, scalar: bool = True
    ) -> Spec:
        count = self._draw.choices(*self._counts)[0]
        if small:
            count = min(count, 5000)
        shapes: list[tuple[int, ...]] = [(count,)]
        if count == 0:
            shapes += [(0, 3), (2, 0)]
        elif count == 1:
            shapes += [(1, 1)] + [()] * scalar
        else:
            rows = self._draw.randint(2, 7)
            shapes += [(rows, -(-count // rows)), (rows, 1, 2, -(-count // (2 * rows)))]
        dtype = self._dtype_for(op) if dtype is None else dtype
        return Spec(self._draw.choice(shapes), dtype, self._seed(), bits=op is None)


def execute(
    program: Program, rank: int, under_test: Mapping[int, Place], reference: Mapping[int, Place] | None
) -> list[bytes]:
    """Run a program and check every result: against what it must be, and against what `reference` gives.

    Args:
        program: what to run.
        rank: this process's.
        under_test: this rank in those of the program's groups that it is in.
        reference: the same over a back-end that is trusted, or None.

    Returns:
        the results of all all-reduces of the group of all ranks, which must agree between the ranks bit by bit.
    """
    order = random.Random(program.seed + 7919 * rank)
    reductions = []
    for n, batch in enumerate(program.batches):
        mine = [step for step in batch if step.group in under_test and under_test[step.group].can(step.call)]
        running = [(step, under_test[step.group].start(step.call, step.mode)) for step in mine]
        waits = [wait for _, one in running for wait in one.waits]
        order.shuffle(waits)
        for wait in waits:
            wait()
        for step, one in running:
            place = under_test[step.group]
            where = f"seed {program.seed}, batch {n}, rank {place.rank} of group {program.groups[step.group]}, {step}"
            found = differences(step.call, place, one)
            assert not found, f"{where}\n" + "\n".join(found)
            if reference is not None and reference[step.group].can(step.call):
                trusted = reference[step.group].start(step.call, Mode.SYNC)
                trusted.finish()
                found = differences(step.call, reference[step.group], trusted)
                assert not found, f"the reference itself: {where}\n" + "\n".join(found)
            if isinstance(step.call, AllReduce) and place.size == max(map(len, program.groups)):
                reductions += [bits(out).numpy().tobytes() for out in one.outputs]
    return reductions
