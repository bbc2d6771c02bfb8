"""The order of one rank's actions: nothing is used before it is there, and weights are what they say they are."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from paceline.errors import ScheduleError
from paceline.schedule.actions import Action, Edges, Op, Payload, Schedule, payload_of


def check_rank(schedule: Schedule, edges: Edges, rank: int) -> None:
    """Hold the list of one rank to its order.

    Raises:
        ScheduleError: an action comes too early, or reads or makes a version that cannot be.
    """
    walk = _Walk(schedule, edges, rank)
    for position, action in enumerate(schedule.actions[rank]):
        why = walk.wrong(action)
        if why is not None:
            raise fault(rank, position, action, why)
        walk.take(position, action)
    for stage, weights in sorted(walk.weights.items()):
        if weights.last_gradient is not None:
            position = weights.last_gradient
            why = f"no UPDATE of stage {stage} comes after it, so its gradient is lost"
            raise fault(rank, position, schedule.actions[rank][position], why)


def fault(rank: int, position: int, action: Action, why: str) -> ScheduleError:
    """Return the error that says what is wrong with one action."""
    return ScheduleError(f"rank {rank}, action {position} ({action}): {why}.")


@dataclass
class _Weights:
    """Of one stage on a rank: its newest version, and what the next one will be made of."""

    newest: int = 0
    last_gradient: int | None = None  # position of the last gradient since the newest version
    reduced: bool = False


@dataclass
class _Walk:
    """What has happened on a rank so far."""

    schedule: Schedule
    edges: Edges
    rank: int
    weights: dict[int, _Weights] = field(default_factory=lambda: defaultdict(_Weights))
    _done: set[tuple[Op, int, int]] = field(default_factory=set)
    _received: set[tuple[Payload, int, int, int]] = field(default_factory=set)
    _versions: dict[tuple[int, int], int] = field(default_factory=dict)  # that F of (stage, micro-batch) read

    def take(self, position: int, action: Action) -> None:
        """Note that an action, found right, has happened."""
        stage, index = action.stage, action.micro_batch
        weights = self.weights[stage]
        match action.op:
            case Op.RECEIVE:
                assert action.payload is not None and action.peer is not None
                self._received.add((action.payload, action.peer, stage, index))
            case Op.REDUCE:
                weights.reduced = True
            case Op.UPDATE:
                self.weights[stage] = _Weights(action.version)
            case Op.SEND:
                pass
            case _:
                self._done.add((action.op, stage, index))
                if action.op is Op.FORWARD:
                    self._versions[stage, index] = action.version
                if action.op.makes_gradients:
                    weights.last_gradient = position

    def wrong(self, action: Action) -> str | None:
        """Return why an action cannot happen now, or None."""
        match action.op:
            case Op.FORWARD:
                return self._wrong_version(action) or self._missing_input(action)
            case Op.BACKWARD | Op.BACKWARD_INPUT | Op.BACKWARD_WEIGHT:
                return self._wrong_gradient(action)
            case Op.SEND:
                assert action.payload is not None
                made = self._made(action.payload, action.stage, action.micro_batch)
                return None if made else "what it sends has not been made yet"
            case Op.REDUCE | Op.UPDATE:
                return self._wrong_update(action)
            case Op.RECEIVE:
                return None

    def _wrong_version(self, action: Action) -> str | None:
        newest = self.weights[action.stage].newest
        if action.version <= newest:
            return None
        return f"it reads version {action.version} of its stage, whose newest is {newest}"

    def _missing_input(self, action: Action) -> str | None:
        payload = payload_of(action.op)
        assert payload is not None
        index = action.micro_batch
        for source in self.edges.sources(action.op, action.stage):
            if self.schedule.rank_of(source, index) == self.rank:
                if not self._made(payload, source, index):
                    return f"it reads {payload.value} of stage {source}, which has not been made yet"
            elif (payload, source, action.stage, index) not in self._received:
                return f"it reads {payload.value} of stage {source}, which has not been received yet"
        return None

    def _wrong_gradient(self, action: Action) -> str | None:
        stage, index = action.stage, action.micro_batch
        before = Op.BACKWARD_INPUT if action.op is Op.BACKWARD_WEIGHT else Op.FORWARD
        if (before, stage, index) not in self._done:
            return f"{before.value} of its micro-batch has not been done yet"
        if action.version != self._versions[stage, index]:
            return f"it reads version {action.version}, but its F read version {self._versions[stage, index]}"
        if action.op.makes_gradients and self.weights[stage].reduced:
            return "it comes between REDUCE and UPDATE of its stage"
        return None if action.op is Op.BACKWARD_WEIGHT else self._missing_input(action)

    def _wrong_update(self, action: Action) -> str | None:
        weights = self.weights[action.stage]
        if weights.last_gradient is None:
            return "there is no gradient since the last UPDATE of its stage"
        if action.op is Op.REDUCE:
            return "its stage is reduced already" if weights.reduced else None
        if not weights.reduced:
            return "REDUCE of its stage must come first"
        if action.version != weights.newest + 1:
            return f"the next version of its stage is {weights.newest + 1}"
        return None

    def _made(self, payload: Payload, stage: int, index: int) -> bool:
        makers = (Op.FORWARD,) if payload is Payload.ACTIVATION else (Op.BACKWARD, Op.BACKWARD_INPUT)
        return any((op, stage, index) in self._done for op in makers)
