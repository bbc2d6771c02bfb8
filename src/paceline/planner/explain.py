"""Explaining one mesh: capture, placement and scheduling in this process, and what they came to. No rank is started."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from paceline.placement.constraints import pinned
from paceline.placement.place import PlacedProgram, place
from paceline.plan import Plan
from paceline.planner.activations import activations
from paceline.planner.captured import Captured
from paceline.planner.explanation import Explanation, Held, Memory, Seconds, Unknown
from paceline.planner.transfers import per_block, totals, transfers
from paceline.planner.uneven import uneven
from paceline.program.build import Factory, build, checked_batch
from paceline.program.capture import Batch, capture
from paceline.program.program import InputRole, OutputRole, Program
from paceline.runtime.figures import known_costs
from paceline.runtime.passes.communicate import communicate
from paceline.runtime.planning import in_modes, training_modes
from paceline.runtime.program_cache import default_directory
from paceline.runtime.step import cut

ADAMW = ("AdamW", 2)


def explain(
    module: nn.Module,
    batch: Batch,
    plan: Plan,
    *,
    autocast: torch.dtype | None = None,
    optimizer: tuple[str, int] = ADAMW,
    tell: Callable[[str], None] = lambda _: None,
) -> Explanation:
    """Return what a plan amounts to for a training step of `module`: where tensors live, what moves, what it costs.

    Args:
        module: called as `module(*batch)` or `module(**batch)`, returns a scalar loss or an object with `.loss`.
        batch: an example of a global batch, a tuple or a dictionary.
        plan: mesh and options.
        autocast: run the forward pass under autocast to this dtype.
        optimizer: its name, and how many numbers it keeps for each element of a parameter.
        tell: is told what is being done, in a few words.

    Raises:
        CaptureError: the module cannot be captured; the message shows the user's line.
        PlanError: the mesh does not fit the batch, or a pin the mesh; it says what would.
        PlacementError: a pin cannot be followed.
    """
    began = time.perf_counter()
    tell("capturing a training step")
    with in_modes(module, training_modes(module)):
        program = capture(module, batch, autocast=autocast)
    captured_at = time.perf_counter()
    tell("placing it")
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    placed = place(program, plan, costs=known_costs(device, default_directory()))
    placed_at = time.perf_counter()
    tell("reading what it came to")
    held = _held(program, placed)  # before the program is used up
    sources = Captured(program)
    parts = cut(placed, plan)
    made = tuple(activations(parts, sources))
    homes = {item.name: dict(zip(plan.mesh.names, item.placements, strict=True)) for _, item in held}
    exchanged = tuple(transfers(parts, sources, homes))
    for graph in filter(None, (parts.forward, parts.backward)):
        communicate(graph, plan.bucket_bytes)
    parameters = tuple(item for role, item in held if role is InputRole.PARAMETER)
    buffers = tuple(item for role, item in held if role is InputRole.BUFFER)
    name, states = optimizer
    gradients = sum(item.bytes for item in parameters if item.trained)
    fixed = {axis: {item.name for item in found} for axis, found in pinned(program, plan.pins, plan.mesh.names).items()}
    return Explanation(
        plan=plan,
        optimizer=name,
        memory=Memory(
            parameters=sum(item.bytes for item in parameters),
            buffers=sum(item.bytes for item in buffers),
            gradients=gradients,
            optimizer=states * gradients,
            kept=sum(item.bytes for item in made if item.kept),
        ),
        parameters=parameters,
        buffers=buffers,
        activations=made,
        transfers=exchanged,
        totals=totals(exchanged, plan.mesh.names, parts.forward, parts.backward),
        per_block=per_block(exchanged, plan.mesh.names),
        solver=placed.reports,
        uneven=tuple(uneven(parameters, plan.mesh, fixed)),
        unknown=_unknown(program, placed),
        seconds=Seconds(captured_at - began, placed_at - captured_at, time.perf_counter() - placed_at),
    )


def explain_factory(factory: str | Factory, plan: Plan, *, tell: Callable[[str], None] = lambda _: None) -> Explanation:
    """Return what `explain` does for the module and batch that a factory makes.

    Args:
        factory: what makes (module, batch), or its name: `package.module:callable` or `path/to/file.py:callable`.
        plan: see `explain`.
        tell: see `explain`.

    Raises:
        RecipeError: the factory cannot be used.
        CaptureError, PlanError, PlacementError: see `explain`.
    """
    tell("building the module")
    module, batch = build(factory, {}, seed=0)
    return explain(module, checked_batch(batch), plan, tell=tell)


def _held(program: Program, placed: PlacedProgram) -> list[tuple[InputRole, Held]]:
    """Return parameters and buffers, as a rank holds them."""
    trained = {output.name for output in program.outputs if output.role is OutputRole.GRADIENT}
    found = []
    for item, node, piece in zip(program.inputs, program.placeholders, placed.program.placeholders, strict=True):
        value, local = node.meta["val"], piece.meta["val"]
        held = Held(
            name=item.name,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(value.shape),
            placements=placed.placements[item],
            local=tuple(local.shape),
            bytes=local.nbytes,
            whole_bytes=value.nbytes,
            trained=item.name in trained,
            aliases=tuple(alias for alias, name in program.aliases.items() if name == item.name),
        )
        found.append((item.role, held))
    return found


def _unknown(program: Program, placed: PlacedProgram) -> tuple[Unknown, ...]:
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return tuple(
        Unknown(name, tuple(node.meta.get("module", "") for node in calls if str(node.target) == name))
        for name in placed.unknown_operators
    )
