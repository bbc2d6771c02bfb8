"""Steps for a module, made when a batch of a new shape comes: captured, placed, scheduled, or read from the cache.

Rank 0 plans and sends the others the result: equal optima and hash orders differ between processes, and two plans are a
deadlock.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from paceline.placement.costs import Costs
from paceline.placement.place import PlacedProgram, place
from paceline.placement.placements import Placement
from paceline.plan import Plan
from paceline.program.capture import Batch, capture
from paceline.program.fingerprint import fingerprint
from paceline.program.precision import lift
from paceline.program.program import Input, InputRole, Program
from paceline.program.serialize import Json
from paceline.runtime.figures import costs_of
from paceline.runtime.hollow import Hollow
from paceline.runtime.peers import Peers, Stored
from paceline.runtime.program_cache import ProgramCache, default_directory
from paceline.runtime.step import PlacedInput, Step, schedule
from paceline.runtime.stored import step_from_json, step_to_json

_log = logging.getLogger(__name__)
_STATE = (InputRole.PARAMETER, InputRole.BUFFER)


@dataclass(frozen=True)
class Startup:
    """Seconds that a step took to make on this rank; capture and placement are zero where the cache had it."""

    capture_s: float
    place_s: float
    total_s: float


class Placed(Protocol):
    """What every kind of step knows."""

    @property
    def inputs(self) -> tuple[PlacedInput, ...]:
        """Parameters, buffers and batch, with their placements."""
        ...

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that travel beside the stored step."""
        ...

    @property
    def unknown_operators(self) -> tuple[str, ...]:
        """Operators without a rule."""
        ...


S = TypeVar("S", bound=Placed)


class Maker(Protocol[S]):
    """How a kind of step is made of a placed program, stored, and read."""

    def make(self, placed: PlacedProgram, plan: Plan) -> S:
        """Return the step of a placed program, which is used up."""
        ...

    def store(self, step: S) -> dict[str, Json]:
        """Return a step as JSON values; its constants travel beside it."""
        ...

    def read(self, data: Mapping[str, Json], constants: Mapping[str, Tensor], *, fakes: bool) -> S:
        """Return what `store` wrote; `fakes` as in `runtime.stored.step_from_json`."""
        ...

    def depends_on(self) -> dict[str, Json]:
        """Return what else a step depends on, beside module, batch and plan."""
        ...


class StepMaker:
    """Makes steps of two graphs."""

    def make(self, placed: PlacedProgram, plan: Plan) -> Step:
        """Cut it into passes and put its collectives in order."""
        return schedule(placed, plan)

    def store(self, step: Step) -> dict[str, Json]:
        """Return it as JSON values."""
        return step_to_json(step)

    def read(self, data: Mapping[str, Json], constants: Mapping[str, Tensor], *, fakes: bool) -> Step:
        """Return what `store` wrote."""
        return step_from_json(data, constants, fakes=fakes)

    def depends_on(self) -> dict[str, Json]:
        """Nothing."""
        return {}


class Planner(Generic[S]):
    """Makes and remembers the steps of one module."""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        peers: Peers,
        autocast: torch.dtype | None,
        maker: Maker[S],
        *,
        lifted: bool,
    ) -> None:
        self._maker = maker
        self._module = module
        self._plan = plan
        # What a rank may hold is of one stage, of which the program that is placed has several.
        memory = None if plan.memory_bytes is None else plan.memory_bytes * plan.mesh.stage_ranks
        self._inner = plan.with_(mesh=plan.mesh.inner, memory_bytes=memory)
        self._peers = peers
        self._autocast = autocast
        self._lifted = lifted
        self._training_modes = training_modes(module)
        self._cache = ProgramCache(default_directory())
        self._steps: dict[Any, S] = {}
        self._held: dict[Input, tuple[Placement, ...]] = {}
        self._costs: Costs | None = None
        self._capture_s = self._place_s = 0.0
        self.startups: list[Startup] = []
        self.hollow = Hollow()

    def step(self, batch: Batch, *, training: bool, split: bool) -> S:
        """Return the step for global batches like `batch`; a collective when it is new.

        Raises:
            CaptureError, PlanError, PlacementError: on every rank when rank 0 cannot plan it.
        """
        key = _key(batch, training, split)
        if key not in self._steps:
            self._steps[key] = self._make(batch, training, split)
        return self._steps[key]

    def adopt(self, program: Program, batch: Batch, *, split: bool = True) -> S:
        """Return the step for batches like `batch`, from a program that was captured already; in one process only.

        Raises:
            PlanError, PlacementError: it cannot be placed.
        """
        placed = place(program.copy(), self._inner, split_batch=split, held=self._held)
        made = self._maker.make(placed, self._plan)
        step = self._maker.read(self._maker.store(made), made.constants, fakes=self._plan.compile)
        self._steps[_key(batch, training=program.training, split=split)] = step
        self._remember(step)
        return step

    def _make(self, batch: Batch, training: bool, split: bool) -> S:
        began = time.perf_counter()
        if self._costs is None:
            self._costs = costs_of(self._peers, self._inner, self._cache.directory)
        data, constants = self._peers.from_leader(lambda: self._stored(batch, training, split))
        # Every rank, rank 0 too, runs what was stored: there is one plan.
        step = self._maker.read(data, constants, fakes=self._plan.compile)
        self.startups.append(Startup(self._capture_s, self._place_s, time.perf_counter() - began))
        self._remember(step)
        return step

    def _remember(self, step: S) -> None:
        """The first step says where parameters live, and all others find them there."""
        if not self._held:
            self._held = {placed.item: placed.placements for placed in step.inputs if placed.item.role in _STATE}

    def _stored(self, batch: Batch, training: bool, split: bool) -> Stored:
        """Return the step as stored values, from the cache where it is there. Runs on rank 0 only."""
        with self.hollow.shaped(), in_modes(self._module, self._training_modes if training else {}):
            return self._from_cache(batch, split)

    def _from_cache(self, batch: Batch, split: bool) -> Stored:
        held = {f"{item.role.value}/{item.name}": list(map(str, along)) for item, along in self._held.items()}
        extra = {
            "plan": self._plan.to_dict(),
            "split": split,
            "autocast": str(self._autocast),
            "lifted": self._lifted,
            "held": held,
            **self._maker.depends_on(),
        }
        found = fingerprint(self._module, batch, extra) if self._cache.directory is not None else None
        entry = self._cache.load(found.key) if found is not None else None
        if entry is not None:
            self._capture_s = self._place_s = 0.0
            return entry.data, entry.constants
        began = time.perf_counter()
        program = capture(self._module, batch, autocast=self._autocast)
        if self._lifted:
            program = lift(program)
        captured = time.perf_counter()
        placed = place(program, self._inner, split_batch=split, held=self._held, costs=self._costs)
        step = self._maker.make(placed, self._plan)
        self._capture_s, self._place_s = captured - began, time.perf_counter() - captured
        if step.unknown_operators:
            _log.warning("no rule for %s: every rank computes them whole", ", ".join(step.unknown_operators))
        data = self._maker.store(step)
        if found is not None:
            self._cache.store(found.key, data, step.constants, found.packages)
        return data, step.constants


def training_modes(module: nn.Module) -> dict[nn.Module, bool]:
    """Return which parts of a module are in training when it is.

    A module that is given in training may hold parts in evaluation, frozen batch norms say: they stay so.
    """
    return {part: part.training or not module.training for part in module.modules()}


@contextlib.contextmanager
def in_modes(module: nn.Module, training: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Put each part of a module into training as told, all others into evaluation; restore them afterwards.

    Gradients are recorded inside, whether or not the caller has them recorded: a step is planned with both its passes,
    even when it is first called for its loss alone.
    """
    before = {part: part.training for part in module.modules()}
    try:
        for part in before:
            part.training = training.get(part, False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for part, was in before.items():
            part.training = was


def _key(batch: Batch, training: bool, split: bool) -> Any:
    leaves, structure = pytree.tree_flatten(batch)
    return tuple(_signature(leaf) for leaf in leaves), structure, training, split


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), repr(leaf)
