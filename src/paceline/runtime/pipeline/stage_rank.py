"""One pipeline rank as long as the module lives: its stages' parameters, its programs, its way to the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from paceline.plan import Mesh
from paceline.program.stages import Part
from paceline.runtime.executor import Executor, RankValues
from paceline.runtime.pipeline.channels import Channel
from paceline.runtime.pipeline.step import PipelineStep
from paceline.runtime.state import LocalState

Pieces = list[Tensor]
"""A tensor's piece on each rank of the inner mesh that lives here."""


@dataclass
class StageRank:
    """A pipeline rank, with the ranks of its inner mesh that live in this process.

    Attributes:
        number: where it stands in the pipeline.
        stages: which stages lie on it, in order.
        mesh: the inner mesh.
        executor: runs graphs for the ranks of the inner mesh.
        devices: of these ranks.
        state: the parameters and buffers of its stages.
        channel: to the other pipeline ranks.
    """

    number: int
    stages: tuple[int, ...]
    mesh: Mesh
    executor: Executor
    devices: tuple[torch.device, ...]
    state: LocalState
    channel: Channel
    _prepared: dict[int, tuple[Any, Callable[[RankValues], RankValues]]] = field(default_factory=dict)

    def run(self, step: PipelineStep, part: Part, columns: list[Pieces]) -> dict[str, Pieces]:
        """Run a part of a stage: given its inputs, return its outputs by name."""
        results = self.run_graph(step, part.graph, columns)
        return dict(zip(part.outputs, results, strict=True))

    def run_graph(self, step: PipelineStep, graph: Graph, columns: list[Pieces]) -> list[Pieces]:
        """Run a graph on the pieces of its inputs; return those of its outputs."""
        if id(graph) not in self._prepared:  # kept with its graph, so that no other one gets its number
            self._prepared[id(graph)] = graph, self.executor.prepare(graph, step.constants)
        here = range(len(self.executor.ranks))
        results = self._prepared[id(graph)][1]([[column[position] for column in columns] for position in here])
        return [list(pieces) for pieces in zip(*results, strict=True)]
