"""The memory of the ranks of a pipeline: the runtime's own walk through the schedule, on tensors without data.

What micro-batches wait with on a stage, what was sent and is not yet let go of, and room for what will be received live
as long as the walk keeps them; what a part of a stage needs while it runs comes on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph

from paceline.plan import Plan
from paceline.program.fake import fake_mode
from paceline.program.program import InputRole
from paceline.program.stages import Part
from paceline.runtime.pipeline.channels import Channel, Message, RankTensors
from paceline.runtime.pipeline.reduce import averaged
from paceline.runtime.pipeline.shares import Shares
from paceline.runtime.pipeline.stage_rank import Pieces, StageRank
from paceline.runtime.pipeline.step import PipelineStep, Sent
from paceline.runtime.pipeline.sums import Sums
from paceline.runtime.pipeline.walk import MicroBatch, Walk
from paceline.runtime.pipeline.wire import Wire, wire_named
from paceline.schedule import Schedule
from paceline.simulator.placed.carriers import Carrier
from paceline.simulator.placed.lifetimes import Lifetimes, lifetimes, recorded_lifetimes
from paceline.simulator.placed.memory import Held, Memory, Peak, Storage
from paceline.simulator.placed.pipeline_parts import outputs_of, values_of
from paceline.simulator.placed.times import Times
from paceline.simulator.placed.tracked import Tracked
from paceline.simulator.placed.update import Update
from paceline.simulator.placed.workspace import Workspaces
from paceline.trace import GRADIENTS, NORM, UPDATE

_STEPS = 2
_HELD = {InputRole.PARAMETER: Held.PARAMETERS, InputRole.BUFFER: Held.BUFFERS, InputRole.BATCH: Held.BATCH}


def peaks_of_pipeline(
    step: PipelineStep,
    plan: Plan,
    schedule: Schedule,
    updates: Sequence[Update],
    times: Times,
    workspaces: Workspaces | None = None,
) -> list[Peak]:
    """Return the peak of the memory of each pipeline rank over the first steps.

    Args:
        step: the stages, as ranks run them.
        plan: that they were placed by.
        schedule: with its messages.
        updates: of what each pipeline rank holds.
        times: whether ranks share memory.
        workspaces: what operators take for themselves.
    """
    carrier = Carrier.SHARED_MEMORY if times.shares_memory else Carrier.FUNCTIONAL
    read = partial(
        lifetimes,
        constants=step.constants,
        mesh=step.mesh,
        carrier=carrier,
        workspaces=workspaces,
        compile=plan.compile,
    )
    known = {id(graph): read(graph) for graph in _graphs(step)}
    return [_RankMemory(step, plan, schedule, number, known).peak(updates[number]) for number in range(schedule.ranks)]


def _graphs(step: PipelineStep) -> Iterator[Graph]:
    for stage in step.pipeline.stages:
        for part in (stage.forward, stage.backward, stage.backward_input, stage.backward_weight):
            if part is not None:
                yield part.graph
    for reduction in step.reductions:
        if reduction is not None:
            yield reduction.graph


class _RankMemory:
    """One pipeline rank."""

    def __init__(
        self, step: PipelineStep, plan: Plan, schedule: Schedule, number: int, lifetimes_of: Mapping[int, Lifetimes]
    ) -> None:
        self._step, self._plan, self._schedule, self._number = step, plan, schedule, number
        self._lifetimes = lifetimes_of
        self._mode = fake_mode()
        self.memory = Memory()
        self.values = values_of(step)
        self.tracked = Tracked(self.memory, self._mode)
        stages = schedule.stages_of(number)
        self._rank = cast(StageRank, _Rank(self, step, number, stages, wire_named(plan.pipeline.wire)))

    def peak(self, update: Update) -> Peak:
        state: Storage | None = None
        with self.tracked:
            for _ in range(_STEPS):
                gradients = self._passes(update, state)
                if self._schedule.is_asynchronous:
                    state = state or self.memory.hold(Storage(update.state_bytes, Held.OPTIMIZER), phase=UPDATE)
                    continue
                self._run(update.norm, NORM)
                state = state or self.memory.hold(Storage(update.state_bytes, Held.OPTIMIZER), phase=UPDATE)
                self._run(update.step, UPDATE)
                del gradients
        return self.memory.peak

    def _passes(self, update: Update, state: Storage | None) -> list[Any]:
        """Walk through the schedule; return the gradients."""
        step = self._step
        batch = [MicroBatch(step, [self._batch()], seed=0) for _ in range(self._schedule.micro_batches)]
        shares = Shares([step] * self._schedule.micro_batches, equal=True)
        walk = Walk(
            self._rank,
            self._schedule,
            batch,
            shares,
            frozenset(self._plan.pipeline.recompute),
            update=(lambda stage, version, sums: None) if self._schedule.is_asynchronous else None,
        )
        while not walk.is_over:
            action = self._schedule.actions[self._number][walk.position]
            self.tracked.phase = str(action)
            self.tracked.held = Held.GRADIENTS if action.op.makes_gradients else Held.ACTIVATIONS
            walk.go_on()
        walk.finish()
        self.tracked.phase, self.tracked.held = GRADIENTS, Held.GRADIENTS
        found = []
        for stage in self._schedule.stages_of(self._number):
            sums = walk.sums.pop(stage, Sums())
            found.append(averaged(self._rank, step, stage, sums))
        return found

    def _batch(self) -> dict[str, Tensor]:
        """Every rank is given whole micro-batches, whichever of them its stages read."""
        return {
            item.name: self.tracked.new(self.values[name], Held.BATCH)
            for name, item in self._step.pipeline.inputs.items()
            if item.role is InputRole.BATCH and name in self.values
        }

    def _run(self, graph: Graph, phase: str) -> None:
        inputs = [Storage(0, Held.GRADIENTS) for node in graph.nodes if node.op == "placeholder"]
        for storage in inputs:
            self.memory.hold(storage, phase=phase)
        self.memory.run(recorded_lifetimes(graph), inputs, phase)

    def run_graph(self, graph: Graph, columns: list[Pieces], *, reduces: bool = False) -> list[Pieces]:
        """Run a graph on tensors without data."""
        inputs = [self.memory.hold(self.tracked.storage(pieces[0])) for pieces in columns]
        values = [node.meta["val"] for node in outputs_of(graph)]
        held = [Held.GRADIENTS] * len(values) if reduces else ()
        found = self.memory.run(self._lifetimes[id(graph)], inputs, self.tracked.phase, outputs=held)
        made = [[self.tracked.like(value, storage)] for value, storage in zip(values, found, strict=True)]
        self.memory.drop_all(found)
        return made


class _Rank:
    """Stands in for `StageRank`."""

    def __init__(
        self, memory: _RankMemory, step: PipelineStep, number: int, stages: tuple[int, ...], wire: Wire
    ) -> None:
        self.number, self.stages, self.mesh = number, stages, step.mesh
        self.devices = (torch.device("cpu"),)
        self.channel = cast(Channel, _Channel(memory, wire))
        self.state = _State(memory, step, stages)
        self.executor = _Executor()
        self._memory = memory

    def run(self, step: PipelineStep, part: Part, columns: list[Pieces]) -> dict[str, Pieces]:
        """Run a part."""
        return dict(zip(part.outputs, self._memory.run_graph(part.graph, columns), strict=True))

    def run_graph(self, step: PipelineStep, graph: Graph, columns: list[Pieces]) -> list[Pieces]:
        """Run sums of gradients."""
        return self._memory.run_graph(graph, columns, reduces=True)


class _Executor:
    ranks = (0,)


class _State:
    """The parameters and buffers of the stages of a rank."""

    def __init__(self, memory: _RankMemory, step: PipelineStep, stages: tuple[int, ...]) -> None:
        found: dict[str, Tensor] = {}
        for stage in stages:
            for role in (InputRole.PARAMETER, InputRole.BUFFER):
                for value, name in step.reads(stage, role).items():
                    if name not in found:
                        found[name] = memory.tracked.new(memory.values[value], _HELD[role])
        self.pieces = [found]


class _Channel:
    """Keeps what is sent until it is let go of, and makes room for what is expected."""

    def __init__(self, memory: _RankMemory, wire: Wire) -> None:
        self._memory = memory
        self._wire = wire
        self._sent: dict[Message, list[Tensor]] = {}
        self._rooms: dict[Message, list[tuple[Sent, list[Tensor]]]] = {}

    def send(self, message: Message, rank: int, values: RankTensors) -> None:
        """Keep what travels."""
        self._sent[message] = [part for (x,) in values for part in self._encoded(x)]

    def expect(self, message: Message, rank: int, sent: Sequence[Sent]) -> None:
        """Make room."""
        self._rooms[message] = [(item, [self._room(part) for part in self._wire.layout(item)]) for item in sent]

    def has(self, message: Message) -> bool:
        """Whether it was expected."""
        return True

    def receive(self, message: Message) -> RankTensors:
        """Return what the room was made for."""
        return [[self._wire.decode(parts, sent)] for sent, parts in self._rooms.pop(message)]

    def release(self, message: Message) -> None:
        """Let go."""
        del self._sent[message]

    def _encoded(self, x: Tensor) -> list[Tensor]:
        return self._wire.encode(x)

    def _room(self, sent: Sent) -> Tensor:
        """Numbers that the walk looks at have data: a share, or the state of a generator."""
        if sent.shape == () and sent.dtype == torch.float64:
            return torch.ones((), dtype=torch.float64)
        if sent.dtype == torch.uint8:
            return torch.get_rng_state()
        return self._memory.tracked.room(sent.shape, sent.dtype)
