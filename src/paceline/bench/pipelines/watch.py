"""What ranks of a pipeline are seen to do: how long they compute, send and wait, and what they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch.distributed as dist

from paceline.bench.contestants import Contender
from paceline.bench.pipelines.contestants import (
    Schedule,
    Setting,
    as_trained,
    control,
    pipelined,
    without_messages,
)
from paceline.bench.pipelines.control import Control
from paceline.bench.workloads import Batch
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.pipeline.scheduling import edges_of
from paceline.runtime.pipeline.walk import Walk
from paceline.schedule import Action, Op


class Times:
    """Adds up the seconds of a step's actions."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.ended = 0.0
        self.seconds: dict[tuple[Op, int], list[float]] = defaultdict(list)

    def __call__(self, walk: Walk, action: Action, began: float, ended: float) -> None:
        """Take an action down."""
        self.began = began if self.began is None else self.began
        self.ended = ended
        self.seconds[action.op, action.stage].append(ended - began)

    def to_json(self) -> dict[str, float | None]:
        """Return when the first action began and the last one ended, and the seconds of computing, sending, waiting."""
        return {
            "began": self.began,
            "ended": self.ended,
            "computing": self._total(lambda op: op.is_compute),
            "sending": self._total(lambda op: op is Op.SEND),
            "receiving": self._total(lambda op: op is Op.RECEIVE),
        }

    def _total(self, counts: Callable[[Op], bool]) -> float:
        return sum(sum(seconds) for (op, _), seconds in self.seconds.items() if counts(op))


class Held:
    """Finds the most bytes that the micro-batches of a step hold at once on each stage of a rank."""

    def __init__(self) -> None:
        self.most: dict[int, int] = defaultdict(int)

    def __call__(self, walk: Walk, action: Action, began: float, ended: float) -> None:
        """Count what is held after an action; tensors that share memory count once."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in walk.held(action.stage)}
        self.most[action.stage] = max(self.most[action.stage], sum(storages.values()))


def watch(setting: Setting, schedules: Sequence[Schedule], rounds: int) -> dict[str, Any]:
    """Return by schedule what this rank of ours and of its control was seen to do; a collective."""
    found: dict[str, Any] = {schedule: {} for schedule in schedules}
    for schedule in schedules:
        module, batch = setting.workload.build()
        ours = pipelined(setting, schedule, module, batch)
        trained = as_trained(setting, ours, batch)
        found[schedule] |= {
            "rounds": [times.to_json() for times in _steps(trained, ours, rounds)],
            "held": _held(trained, ours),
            **_layout(ours, batch),
        }
    for schedule in dict.fromkeys(schedule.control for schedule in schedules):
        module, batch = setting.workload.build()
        alone = control(setting, schedule, module, batch)
        seen = _steps(without_messages(setting, alone), alone, rounds)
        found.setdefault(schedule, {})["durations"] = _durations(seen)
    return found


def _steps(trained: Contender, observed: PipelinedModule | Control, rounds: int) -> list[Times]:
    trained.step()
    found = []
    for _ in range(rounds):
        observed.observe = times = Times()
        dist.barrier()
        trained.step()
        found.append(times)
    observed.observe = None
    return found


def _held(trained: Contender, ours: PipelinedModule) -> dict[str, int]:
    ours.observe = held = Held()
    trained.step()
    ours.observe = None
    return {str(stage): count for stage, count in held.most.items()}


def _durations(seen: list[Times]) -> dict[str, float]:
    """The median seconds of each computation of each stage, `F 0` and so on."""
    every: dict[str, list[float]] = defaultdict(list)
    for times in seen:
        for (op, stage), seconds in times.seconds.items():
            if op.is_compute:
                every[f"{op.value} {stage}"] += seconds
    return {key: median(seconds) for key, seconds in every.items()}


def _layout(ours: PipelinedModule, batch: Batch) -> dict[str, Any]:
    """What the cut says: bytes that each stage saves of a micro-batch, and between which stages values move."""
    pipeline = ours.steps(**batch)[0].pipeline
    edges = edges_of(pipeline)
    return {
        "saved": list(pipeline.saved_bytes),
        "forward": sorted(edges.forward),
        "backward": sorted(edges.backward),
    }
