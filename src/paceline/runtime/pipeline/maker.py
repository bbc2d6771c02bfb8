"""Making the steps of a pipeline: the first one says where stages begin, and all others follow it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline.placement.place import PlacedProgram
from paceline.plan import Plan
from paceline.program.serialize import Json
from paceline.program.stages import Pipeline
from paceline.runtime.pipeline.scheduling import Schedules
from paceline.runtime.pipeline.step import PipelineStep, stage_step
from paceline.runtime.pipeline.stored import pipeline_from_json, pipeline_to_json


class PipelineMaker:
    """Makes steps of stages.

    Args:
        schedules: how many stages there are, and whether backward passes come in two parts.
    """

    def __init__(self, schedules: Schedules) -> None:
        self._stages = len(schedules.replicas)
        self._split_backward = schedules.splits_backward
        self._first: Pipeline | None = None

    def make(self, placed: PlacedProgram, plan: Plan) -> PipelineStep:
        """Cut it into stages and put the collectives of each in order."""
        return stage_step(placed, plan, self._stages, split_backward=self._split_backward, like=self._first)

    def store(self, step: PipelineStep) -> dict[str, Json]:
        """Return it as JSON values."""
        return pipeline_to_json(step)

    def read(self, data: Mapping[str, Json], constants: Mapping[str, Tensor], *, fakes: bool) -> PipelineStep:
        """Return what `store` wrote."""
        step = pipeline_from_json(data, constants, fakes=fakes)
        if self._first is None:
            self._first = step.pipeline
        return step

    def depends_on(self) -> dict[str, Json]:
        """How many stages there are, of what parts, and where the first step was cut."""
        cuts = None if self._first is None else list(self._first.cuts)
        return {"stages": self._stages, "split_backward": self._split_backward, "cuts": cuts}
