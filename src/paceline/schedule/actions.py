"""What a pipeline does, as data: actions, the list of each rank, and the edges between stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from paceline.errors import ScheduleError


class Op(Enum):
    """What an action does."""

    __hash__ = object.__hash__  # of what is there once; Enum's own takes half of the time of a walk

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND = "SEND"
    RECEIVE = "RECV"
    REDUCE = "REDUCE"
    UPDATE = "UPDATE"

    @property
    def is_compute(self) -> bool:
        """Whether it runs a part of a stage on a micro-batch."""
        return self in _COMPUTE

    @property
    def is_message(self) -> bool:
        """Whether it is one end of a message between two ranks."""
        return self in (Op.SEND, Op.RECEIVE)

    @property
    def makes_gradients(self) -> bool:
        """Whether the gradients of a stage's parameters for a micro-batch exist after it."""
        return self in (Op.BACKWARD, Op.BACKWARD_WEIGHT)

    @property
    def sends_gradients(self) -> bool:
        """Whether it makes what earlier stages wait for in their backward pass."""
        return self in (Op.BACKWARD, Op.BACKWARD_INPUT)


_COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})


class Payload(Enum):
    """What a message carries: values of the forward pass, or those of the backward pass."""

    __hash__ = object.__hash__

    ACTIVATION = "act"
    GRADIENT = "grad"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    `version` is the weight version that F, B, I and W read (B, I and W read that of their F) and that an UPDATE makes;
    versions of a stage count from 0, the weights a schedule starts with. Other actions leave it 0.
    REDUCE and UPDATE are of a stage, not of a micro-batch: they leave `micro_batch` 0. An UPDATE applies the gradients
    of all micro-batches whose B or W came since the last one on its rank; REDUCE, before it, adds them up over all
    ranks that hold the parameters.
    `payload` and `peer`, the stage at the other end, are those of SEND and RECV.
    """

    op: Op
    stage: int
    micro_batch: int = 0
    version: int = 0
    payload: Payload | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """`F stage 1 micro-batch 3 version 2`, `RECV stage 1 micro-batch 3 act from 0`, `UPDATE stage 1 version 2`."""
        words = [self.op.value, f"stage {self.stage}"]
        if self.op.is_compute or self.op.is_message:
            words.append(f"micro-batch {self.micro_batch}")
        if self.version:
            words.append(f"version {self.version}")
        if self.payload is not None:
            words += [self.payload.value, f"{'to' if self.op is Op.SEND else 'from'} {self.peer}"]
        return " ".join(words)


@dataclass(frozen=True)
class Schedule:
    """The actions of each pipeline rank, in order.

    Attributes:
        name: of the kind that made it, or whatever a file says.
        micro_batches: all that run, those of every batch of an asynchronous schedule.
        replicas: for each stage, the pipeline ranks that compute it, normally one. Micro-batch `i` of stage `s` runs
            on `replicas[s][i % len(replicas[s])]`.
        actions: one list per pipeline rank.

    Raises:
        ScheduleError: stages and ranks do not fit together.
    """

    name: str
    micro_batches: int
    replicas: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ScheduleError(f"a schedule needs at least one micro-batch, not {self.micro_batches}.")
        for stage, ranks in enumerate(self.replicas):
            if not ranks or len(set(ranks)) != len(ranks):
                raise ScheduleError(f"stage {stage} lies on the ranks {list(ranks)}; name one or more, each once.")
        used = {rank for ranks in self.replicas for rank in ranks}
        if not used or used != set(range(len(self.actions))):
            raise ScheduleError(
                f"the stages lie on the ranks {sorted(used)}, but there are lists of actions for "
                f"{len(self.actions)} ranks; every rank from 0 on needs a stage and a list."
            )

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.replicas)

    @property
    def ranks(self) -> int:
        """How many pipeline ranks there are."""
        return len(self.actions)

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Return the rank that computes this micro-batch of this stage."""
        ranks = self.replicas[stage]
        return ranks[micro_batch % len(ranks)]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that lie on a rank, in order."""
        return tuple(stage for stage, ranks in enumerate(self.replicas) if rank in ranks)

    def everything(self) -> Iterator[Action]:
        """Yield the actions of all ranks."""
        for actions in self.actions:
            yield from actions

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the backward pass comes in two parts, I and W."""
        return any(action.op is Op.BACKWARD_INPUT for action in self.everything())

    @cached_property
    def has_backward(self) -> bool:
        """Whether there is a backward pass at all; there is none in evaluation."""
        return any(action.op.makes_gradients for action in self.everything())

    @cached_property
    def has_messages(self) -> bool:
        """Whether SEND and RECV are in the lists already."""
        return any(action.op.is_message for action in self.everything())

    @cached_property
    def is_asynchronous(self) -> bool:
        """Whether some rank updates weights before its last micro-batch is through."""
        for actions in self.actions:
            ops = [action.op for action in actions]
            if Op.UPDATE in ops and any(op.is_compute for op in ops[ops.index(Op.UPDATE) :]):
                return True
        return False


@dataclass(frozen=True)
class Edges:
    """Between which stages values move: pairs (source, target), which may skip stages.

    Forward edges lead from earlier to later stages, backward edges from later to earlier ones.

    Raises:
        ScheduleError: an edge leads the wrong way.
    """

    forward: frozenset[tuple[int, int]]
    backward: frozenset[tuple[int, int]]

    def __post_init__(self) -> None:
        for source, target in sorted(self.forward):
            if not 0 <= source < target:
                raise ScheduleError(f"a forward edge leads to a later stage; ({source}, {target}) does not.")
        for source, target in sorted(self.backward):
            if not source > target >= 0:
                raise ScheduleError(f"a backward edge leads to an earlier stage; ({source}, {target}) does not.")

    @classmethod
    def chain(cls, stages: int) -> Edges:
        """Return the plain edges: each stage feeds the next one and gets its gradient back."""
        pairs = [(stage, stage + 1) for stage in range(stages - 1)]
        return cls(frozenset(pairs), frozenset((target, source) for source, target in pairs))

    def of(self, payload: Payload) -> frozenset[tuple[int, int]]:
        """Return the edges along which such messages travel."""
        return self.forward if payload is Payload.ACTIVATION else self.backward

    def sources(self, op: Op, stage: int) -> list[int]:
        """Return the stages whose values this action of `stage` reads, in order."""
        return list(self._sources.get((payload_of(op), stage), ()))

    def targets(self, op: Op, stage: int) -> list[int]:
        """Return the stages that read what this action of `stage` makes, in order."""
        return list(self._targets.get((payload_of(op), stage), ()))

    @cached_property
    def _sources(self) -> _Neighbours:
        return _neighbours((payload, target, source) for payload in Payload for source, target in self.of(payload))

    @cached_property
    def _targets(self) -> _Neighbours:
        return _neighbours((payload, source, target) for payload in Payload for source, target in self.of(payload))


_Neighbours = dict[tuple[Payload | None, int], list[int]]


def _neighbours(found: Iterable[tuple[Payload, int, int]]) -> _Neighbours:
    """Return, for each stage and what is sent, the stages at the other end, in order."""
    neighbours: _Neighbours = {}
    for payload, stage, other in sorted(found, key=lambda each: each[1:]):
        neighbours.setdefault((payload, stage), []).append(other)
    return neighbours


def payload_of(op: Op) -> Payload | None:
    """Return what an action takes from other stages and gives to them; None for what stays within a stage."""
    if op is Op.FORWARD:
        return Payload.ACTIVATION
    return Payload.GRADIENT if op.sends_gradients else None
