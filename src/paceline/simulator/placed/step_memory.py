"""The memory of a step of a mesh without stages: its passes, one micro-batch after the other, and its update."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from paceline.placement.placements import Shard
from paceline.plan import Plan
from paceline.program.program import Input, InputRole, OutputRole
from paceline.runtime.step import PlacedInput, Step
from paceline.simulator.placed.carriers import Carrier
from paceline.simulator.placed.lifetimes import Lifetimes, lifetimes, recorded_lifetimes
from paceline.simulator.placed.memory import Held, Memory, Peak, Storage
from paceline.simulator.placed.update import Update
from paceline.simulator.placed.workspace import Workspaces
from paceline.trace import BACKWARD, FORWARD, NORM, UPDATE

_HELD = {
    InputRole.PARAMETER: Held.PARAMETERS,
    InputRole.BUFFER: Held.BUFFERS,
    InputRole.BATCH: Held.BATCH,
    InputRole.TANGENT: Held.ACTIVATIONS,
}
_STEPS = 2
"""The optimizer's state is made at the end of the first step; the second is like all others."""


def peak_of_step(
    step: Step, plan: Plan, update: Update, carrier: Carrier, micro_batches: int, workspaces: Workspaces | None = None
) -> Peak:
    """Return the peak of the memory of a rank over the first steps.

    Args:
        step: as ranks run it.
        plan: that it was placed by.
        update: of what a rank holds.
        carrier: of its collectives.
        micro_batches: of a step.
        workspaces: what operators take for themselves.
    """
    run = _StepMemory(step, plan, update, carrier, workspaces)
    for _ in range(_STEPS):
        gradients: list[Storage] = []
        for index in range(min(micro_batches, 2)):
            more = run.micro_batch()
            run.add(gradients, more, first=index == 0)
        run.update(gradients)
    return run.memory.peak


class _StepMemory:
    def __init__(self, step: Step, plan: Plan, update: Update, carrier: Carrier, workspaces: Workspaces | None) -> None:
        self.memory = Memory()
        self._step = step
        self._update = update
        nodes = [node for node in step.forward.nodes if node.op == "placeholder"]
        self._held = {
            placed.item: self.memory.hold(Storage(_bytes(node.meta["val"]), _HELD[placed.item.role]), phase=FORWARD)
            for placed, node in zip(step.inputs, nodes, strict=True)
        }
        looked_at = shared_parameters(step.inputs, step.mesh.names) if carrier is Carrier.SHARED_MEMORY else {}
        places = {place: looked_at[p.item] for place, p in enumerate(step.inputs) if p.item in looked_at}
        read = partial(
            lifetimes,
            constants=step.constants,
            mesh=step.mesh,
            carrier=carrier,
            workspaces=workspaces,
            compile=plan.compile,
        )
        self._forward = read(step.forward, shared=places)
        self._backward: Lifetimes | None = None
        if step.backward is not None:
            again = _saved_places(self._forward, len(step.outputs), places)
            self._backward = read(step.backward, shared=again)
        self._norm, self._later = recorded_lifetimes(update.norm), recorded_lifetimes(update.step)
        self._add = recorded_lifetimes(update.add)
        self._state: Storage | None = None

    def micro_batch(self) -> list[Storage]:
        """Run both passes; return the gradients."""
        memory, outputs = self.memory, self._step.outputs
        inputs = [memory.hold(storage, phase=FORWARD) for storage in self._held.values()]
        made = memory.run(self._forward, inputs, FORWARD)
        memory.drop_all(
            storage for storage, output in zip(made, outputs, strict=False) if output.role is not OutputRole.LOSS
        )
        loss, saved = made[0], made[len(outputs) :]
        if self._backward is None:
            memory.drop_all([loss, *saved])
            return []
        tangent = memory.hold(Storage(loss.bytes, Held.ACTIVATIONS), phase=BACKWARD)
        gradients = [Held.GRADIENTS] * len(self._step.gradients)
        found = memory.run(self._backward, [*saved, tangent], BACKWARD, outputs=gradients)
        memory.drop(loss)
        return found

    def add(self, gradients: list[Storage], more: list[Storage], *, first: bool) -> None:
        """Keep the gradients of the first micro-batch; add those of the others to them."""
        if first:
            gradients.extend(more)
        else:
            self._run(self._add, BACKWARD)
            self.memory.drop_all(more)

    def update(self, gradients: list[Storage]) -> None:
        """Let the optimizer use the gradients, and drop them."""
        self._run(self._norm, NORM)
        if self._state is None:
            self._state = self.memory.hold(Storage(self._update.state_bytes, Held.OPTIMIZER), phase=UPDATE)
        self._run(self._later, UPDATE)
        self.memory.drop_all(gradients)

    def _run(self, graph: Lifetimes, phase: str) -> None:
        """Run a graph over what is held already."""
        inputs = [self.memory.hold(Storage(0, Held.GRADIENTS), phase=phase) for _ in graph.given]
        self.memory.run(graph, inputs, phase)


def shared_parameters(inputs: tuple[PlacedInput, ...], axes: tuple[str, ...]) -> Mapping[Input, str]:
    """Return the parameters that are pieces of one tensor of all ranks along an axis, where these share memory."""
    found = {}
    for placed in inputs:
        split = [axis for axis, where in zip(axes, placed.placements, strict=True) if isinstance(where, Shard)]
        if placed.item.role is InputRole.PARAMETER and len(split) == 1:
            found[placed.item] = split[0]
    return found


def _saved_places(forward: Lifetimes, outputs: int, places: Mapping[int, str]) -> dict[int, str]:
    """Return which of the saved values are such parameters."""
    axis_of = {forward.given[place]: axis for place, axis in places.items()}
    saved = forward.outputs[outputs:]
    return {place: axis_of[number] for place, number in enumerate(saved) if number in axis_of}


def _bytes(value: object) -> int:
    nbytes: int = value.nbytes  # type: ignore[attr-defined]  # a fake tensor, or what is known of one
    return nbytes
