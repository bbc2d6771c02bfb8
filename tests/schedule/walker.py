"""Runs a schedule, ranks in any order, over channels without labels: what the validator must foresee."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

from paceline.schedule import Action, Edges, Op, Payload, Schedule


class Wrong(Exception):
    """The walk met something that is not there, or not what it should be."""


def walk(schedule: Schedule, edges: Edges, seed: int = 0) -> None:
    """Run to the end; raise `Wrong` at a deadlock, a missing or wrong value, or a gradient that is lost."""
    chance = random.Random(seed)
    ranks = [_Rank(schedule, edges, rank) for rank in range(schedule.ranks)]
    channels: dict[tuple[int, int, Payload], deque[Any]] = defaultdict(deque)
    left = [deque(actions) for actions in schedule.actions]
    while any(left):
        order = [rank for rank in range(schedule.ranks) if left[rank]]
        chance.shuffle(order)
        for rank in order:
            action = left[rank][0]
            if action.op is Op.REDUCE:
                group = schedule.replicas[action.stage]
                if not all(left[other] and left[other][0] == action for other in group):
                    continue
                for other in group:
                    ranks[other].take(left[other].popleft(), channels)
                break
            if ranks[rank].waits(action, channels):
                continue
            ranks[rank].take(left[rank].popleft(), channels)
            break
        else:
            raise Wrong("deadlock")
    if any(channels.values()):
        raise Wrong("messages that nobody received")
    for rank in ranks:
        rank.check_end()


class _Rank:
    def __init__(self, schedule: Schedule, edges: Edges, rank: int) -> None:
        self.schedule, self.edges, self.rank = schedule, edges, rank
        self.values: set[tuple[Payload, int, int, int]] = set()  # payload, from stage, to stage, micro-batch
        self.weights: dict[int, int] = defaultdict(int)
        self.read: dict[tuple[int, int], int] = {}
        self.half: set[tuple[int, int]] = set()
        self.fresh: dict[int, set[int]] = defaultdict(set)
        self.reduced: dict[int, set[int]] = {}
        self.applied: dict[int, set[int]] = defaultdict(set)

    def waits(self, action: Action, channels: Any) -> bool:
        return action.op is Op.RECEIVE and not channels[self._other(action), self.rank, action.payload]

    def take(self, action: Action, channels: Any) -> None:
        stage, index = action.stage, action.micro_batch
        match action.op:
            case Op.FORWARD:
                self._use(Payload.ACTIVATION, stage, index)
                if action.version > self.weights[stage] or (stage, index) in self.read:
                    raise Wrong(str(action))
                self.read[stage, index] = action.version
                self._make(Payload.ACTIVATION, stage, index)
            case Op.BACKWARD | Op.BACKWARD_INPUT:
                if self.read.get((stage, index)) != action.version:
                    raise Wrong(str(action))
                self._use(Payload.GRADIENT, stage, index)
                self._make(Payload.GRADIENT, stage, index)
                if action.op is Op.BACKWARD:
                    self.fresh[stage].add(index)
                else:
                    self.half.add((stage, index))
            case Op.BACKWARD_WEIGHT:
                if (stage, index) not in self.half or self.read[stage, index] != action.version:
                    raise Wrong(str(action))
                self.half.remove((stage, index))
                self.fresh[stage].add(index)
            case Op.SEND:
                value = action.payload, stage, action.peer, index
                if value not in self.values:
                    raise Wrong(str(action))
                channels[self.rank, self._other(action), action.payload].append(value)
            case Op.RECEIVE:
                value = channels[self._other(action), self.rank, action.payload].popleft()
                if value != (action.payload, action.peer, stage, index):
                    raise Wrong(f"{action} got {value}")
                self.values.add(value)
            case Op.REDUCE:
                if stage in self.reduced or not self.fresh[stage]:
                    raise Wrong(str(action))
                self.reduced[stage] = self.fresh.pop(stage)
            case Op.UPDATE:
                if self.fresh[stage] or stage not in self.reduced or action.version != self.weights[stage] + 1:
                    raise Wrong(str(action))
                self.weights[stage] += 1
                self.applied[stage] |= self.reduced.pop(stage)

    def check_end(self) -> None:
        for stage in self.schedule.stages_of(self.rank):
            own = {i for i in range(self.schedule.micro_batches) if self.schedule.rank_of(stage, i) == self.rank}
            if self.applied[stage] != own or self.fresh[stage] or stage in self.reduced:
                raise Wrong(f"stage {stage} applied the gradients of {self.applied[stage]}")

    def _other(self, action: Action) -> int:
        assert action.peer is not None
        return self.schedule.rank_of(action.peer, action.micro_batch)

    def _use(self, payload: Payload, stage: int, index: int) -> None:
        for source, target in self.edges.of(payload):
            if target == stage and (payload, source, stage, index) not in self.values:
                raise Wrong(f"{payload.value} of {source} for {stage}, {index}")

    def _make(self, payload: Payload, stage: int, index: int) -> None:
        self.values |= {(payload, s, target, index) for s, target in self.edges.of(payload) if s == stage}
