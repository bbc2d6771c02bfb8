"""Runs a schedule in virtual time: when each action begins and ends, or who waits for whom forever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from paceline.errors import ScheduleError
from paceline.schedule.actions import Action, Op, Payload, Schedule

Span = tuple[float, float]

# In units of a forward pass. A backward pass is taken for twice the forward pass, and its parts for equal; what is not
# here takes no time.
_UNITS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}


def run(
    schedule: Schedule,
    durations: Mapping[tuple[Op, int], float] | None = None,
    latency: float = 0.0,
    *,
    messages: Mapping[tuple[Payload, int, int], float] | None = None,
    slowness: Mapping[int, float] | None = None,
) -> tuple[tuple[Span, ...], ...]:
    """Return start and end of each action, by rank and position.

    Sends do not block. A receive waits for its message, and a REDUCE for all ranks of its stage.

    Args:
        schedule: with its messages.
        durations: by action and stage; where it says nothing, F, I and W take 1 and B takes 2.
        latency: a message is there so long after its SEND, however many are on the way.
        messages: seconds of a message by what it carries and from which stage to which; those between two ranks go one
            after the other. Latency comes on top.
        slowness: by how much single ranks compute slower.

    Raises:
        ScheduleError: ranks wait for each other; who waits where, and for what.
    """
    clock = _Clock(schedule, durations or {}, latency, messages or {}, slowness or {})
    while clock.advance():
        pass
    clock.check_finished()
    return tuple(map(tuple, clock.spans))


class _Clock:
    def __init__(
        self,
        schedule: Schedule,
        durations: Mapping[tuple[Op, int], float],
        latency: float,
        messages: Mapping[tuple[Payload, int, int], float],
        slowness: Mapping[int, float],
    ) -> None:
        self.schedule = schedule
        self.spans: list[list[Span]] = [[] for _ in schedule.actions]
        self._durations = durations
        self._latency = latency
        self._messages = messages
        self._slowness = slowness
        self._link_free: dict[tuple[int, int], float] = {}  # from rank, to rank
        self._now = [0.0] * schedule.ranks
        self._arrivals: dict[tuple[Payload, int, int, int], float] = {}  # payload, from stage, to stage, micro-batch
        self._meetings: dict[tuple[int, int], dict[int, float]] = {}  # stage and its n-th REDUCE: when each rank came
        self._reduced: Counter[tuple[int, int]] = Counter()  # by rank and stage

    def advance(self) -> bool:
        """Let each rank run until it has to wait; return whether any did something."""
        before = sum(map(len, self.spans))
        for rank, actions in enumerate(self.schedule.actions):
            spans = self.spans[rank]
            while len(spans) < len(actions):
                action = actions[len(spans)]
                start = self._start(rank, action)
                if start is None:
                    break
                self._now[rank] = start + self._duration(rank, action)
                spans.append((start, self._now[rank]))
                if action.op is Op.SEND:
                    self._send(rank, action)
        return sum(map(len, self.spans)) > before

    def check_finished(self) -> None:
        """Raise if some rank is not through."""
        stuck = [
            f"rank {rank} waits at action {len(spans)} ({actions[len(spans)]}) for {self._missing(actions[len(spans)])}"
            for rank, (actions, spans) in enumerate(zip(self.schedule.actions, self.spans, strict=True))
            if len(spans) < len(actions)
        ]
        if stuck:
            raise ScheduleError(f"the schedule is a deadlock: {'; '.join(stuck)}.")

    def _send(self, rank: int, action: Action) -> None:
        assert action.payload is not None and action.peer is not None
        link = rank, self.schedule.rank_of(action.peer, action.micro_batch)
        taken = self._messages.get((action.payload, action.stage, action.peer), 0.0)
        sent = max(self._now[rank], self._link_free.get(link, 0.0)) + taken
        self._link_free[link] = sent
        self._arrivals[action.payload, action.stage, action.peer, action.micro_batch] = sent + self._latency

    def _duration(self, rank: int, action: Action) -> float:
        duration = self._durations.get((action.op, action.stage), _UNITS.get(action.op, 0.0))
        return duration * self._slowness.get(rank, 1.0)

    def _start(self, rank: int, action: Action) -> float | None:
        """Return when an action of a rank begins; None while it waits for others."""
        now = self._now[rank]
        if action.op is Op.RECEIVE:
            assert action.payload is not None and action.peer is not None
            arrival = self._arrivals.get((action.payload, action.peer, action.stage, action.micro_batch))
            return None if arrival is None else max(now, arrival)
        if action.op is Op.REDUCE:
            meeting = self._meetings.setdefault((action.stage, self._reduced[rank, action.stage]), {})
            meeting[rank] = now
            if len(meeting) < len(self.schedule.replicas[action.stage]):
                return None
            self._reduced[rank, action.stage] += 1
            return max(meeting.values())
        return now

    def _missing(self, action: Action) -> str:
        if action.op is Op.REDUCE:
            ranks = self.schedule.replicas[action.stage]
            return f"the other ranks of its stage, {list(ranks)}"
        assert action.peer is not None
        return f"rank {self.schedule.rank_of(action.peer, action.micro_batch)}"
