"""Stages: a program, captured or placed, is cut into the parts that the ranks of a pipeline run.

The joint graph is cut as it is and nothing is differentiated again. This room knows nothing of micro-batches, schedules
or processes.
"""

from paceline.program.stages.cut import cut
from paceline.program.stages.pipeline import Part, Pipeline, Stage

__all__ = ["Part", "Pipeline", "Stage", "cut"]
