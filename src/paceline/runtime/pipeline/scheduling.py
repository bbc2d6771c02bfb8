"""Which schedule a call walks: made for its number of micro-batches, proven once, and remembered."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import PlanError, ScheduleError
from paceline.plan import PipelinePlan
from paceline.program.stages import Pipeline
from paceline.schedule import Edges, Kind, Schedule, communicate, evaluation, make, validate
from paceline.schedule.files import load
from paceline.schedule.places import consecutive

_FILE = ".json"


class Schedules:
    """The schedules of one module.

    Args:
        plan: which kind, or the file that holds one.
        ranks: how many pipeline ranks there are.

    Raises:
        ScheduleError: there is no such schedule for these ranks; the message says what would fit.
    """

    def __init__(self, plan: PipelinePlan, ranks: int) -> None:
        self._plan = plan
        self._ranks = ranks
        self._made: dict[tuple[int, int, bool, Edges], Schedule] = {}
        self._given = _read(plan.schedule, ranks) if plan.schedule.endswith(_FILE) else None
        layout = self._given or self._raw(4 * ranks, batches=1)
        self.replicas = layout.replicas
        self.splits_backward = layout.splits_backward
        given = self._given
        self.is_asynchronous = Kind.of(plan.schedule).is_asynchronous if given is None else given.is_asynchronous

    def training(self, micro_batches: int, edges: Edges, *, batches: int = 1) -> Schedule:
        """Return the schedule for so many micro-batches in a batch, with its messages, proven.

        Raises:
            ScheduleError: the schedule does not fit the number; the message says what would.
        """
        key = micro_batches, batches, True, edges
        if key not in self._made:
            self._made[key] = self._proven(self._raw(micro_batches, batches), edges)
        return self._made[key]

    def group(self, micro_batches: int) -> int:
        """Return how many micro-batches of a batch of so many make one gradient."""
        return 1 if self._plan.schedule == Kind.PIPEDREAM.value else micro_batches

    def evaluation(self, micro_batches: int, edges: Edges) -> Schedule:
        """Return the schedule of forward passes only."""
        key = micro_batches, 1, False, edges
        if key not in self._made:
            self._made[key] = communicate(evaluation(self.replicas, micro_batches), edges)
        return self._made[key]

    def _raw(self, micro_batches: int, batches: int) -> Schedule:
        if self._given is not None:
            if self._given.micro_batches != micro_batches * batches:
                raise ScheduleError(
                    f"the schedule in {self._plan.schedule} is for {self._given.micro_batches} micro-batches, not "
                    f"{micro_batches * batches}: give it as many, or take a schedule by name."
                )
            return self._given
        return make(
            self._plan.schedule,
            self._ranks,
            micro_batches,
            chunks=self._plan.chunks,
            batches=batches,
            replicas=consecutive(self._plan.replicas) if self._plan.replicas else None,
            vertical_sync=self._plan.vertical_sync,
        )

    def _proven(self, schedule: Schedule, edges: Edges) -> Schedule:
        complete = schedule if schedule.has_messages else communicate(schedule, edges)
        validate(complete, edges)
        return complete


def edges_of(*pipelines: Pipeline) -> Edges:
    """Return between which stages values move, for micro-batches of any of these shapes."""
    return Edges(
        frozenset(pair for pipeline in pipelines for pair in pipeline.forward_edges),
        frozenset(pair for pipeline in pipelines for pair in pipeline.backward_edges),
    )


def _read(file: str, ranks: int) -> Schedule:
    schedule = load(Path(file))
    if schedule.ranks != ranks:
        raise PlanError(
            f"the schedule in {file} is for {schedule.ranks} pipeline ranks, but the mesh has pp={ranks}; choose "
            f"pp={schedule.ranks}."
        )
    return schedule
