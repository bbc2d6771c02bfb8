"""`parallelize`: a user's module as one that runs its placed program, for the user's own training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import CaptureError, PlacementError, PlanError
from paceline.placement.placements import Placement
from paceline.plan import Mesh, Plan
from paceline.program.capture import Batch
from paceline.program.program import InputRole, OutputRole, Program
from paceline.program.random import is_random
from paceline.runtime.arrivals import Arrival, with_arrivals
from paceline.runtime.batches import grown, pieces_of_part, pieces_of_whole
from paceline.runtime.executor import RankValues
from paceline.runtime.fallback import FallbackModule
from paceline.runtime.fallback_kind import Fallback
from paceline.runtime.interface import ParallelModule, as_batch, seeded
from paceline.runtime.peers import Peers, connect, in_process
from paceline.runtime.pipeline.build import pipelined
from paceline.runtime.planning import Planner, Startup, StepMaker
from paceline.runtime.state import LocalState, Shard
from paceline.runtime.step import Step
from paceline.trace import BACKWARD, FORWARD, NORM, Recorder, noting

__all__ = ["ParallelModule", "PlacedModule", "Shard", "parallelize"]


def parallelize(
    module: nn.Module,
    batch: Batch,
    plan: Plan | None = None,
    *,
    devices: Sequence[torch.device | str] | None = None,
    autocast: torch.dtype | None = None,
    lifted: bool = False,
    fallback: str | None = None,
) -> ParallelModule:
    """Return `module` split over the ranks of a plan; training it equals training `module` serially.

    A collective: every rank calls it with an equal module. The weights are those of rank 0.

    With one rank per process `module` is consumed: what a rank holds whole it shares with it, and parameters of which
    it keeps a shard give their memory back and read as NaN. To go on using it, copy it before (`copy.deepcopy`).

    Args:
        module: called as `module(*batch)` or `module(**batch)`, returns a scalar loss or an object with `.loss`.
        batch: an example of a global batch, a tuple or a dictionary.
        plan: mesh and options; by default data parallelism over all ranks of `torch.distributed`.
        devices: run all ranks in this process, spread over these devices, instead of one rank per process.
        autocast: run the forward pass under autocast to this dtype.
        lifted: of a float64 module, compute in float64 also what it casts to a lower type; see `program.precision`.
        fallback: `ddp` or `fsdp2`: should the module turn out impossible to capture on this batch, say so in a warning
            and wrap `module` itself so; it promises less, see `runtime.fallback`. It is never taken unasked.

    Raises:
        CaptureError: the module cannot be captured, and no fallback was asked for; the message shows the user's line.
        PlanError: the mesh does not fit the ranks or the fallback, or the batch does not divide; it says what would.
    """
    wrapping = Fallback.parse(fallback) if fallback is not None else None
    if plan is None:
        size = dist.get_world_size() if dist.is_initialized() else len(devices or ()) or 1
        plan = Plan(Mesh((("dp", size),)) if size > 1 else Mesh())
    if wrapping is not None:
        wrapping.check(plan.mesh, in_process=devices is not None)
    if devices is not None:
        peers = in_process(plan.mesh, [torch.device(device) for device in devices])
    else:
        first = next(iter(module.parameters()), None)
        device = first.device if first is not None else torch.device("cpu")
        peers = connect(plan.mesh, device, compile=plan.compile)
    try:
        if plan.mesh.stage_ranks > 1:
            return pipelined(module, batch, plan, peers, autocast, lifted=lifted)
        planner = Planner(module, plan, peers, autocast, StepMaker(), lifted=lifted)
        step = planner.step(batch, training=True, split=True)
    except CaptureError as error:  # on every rank, so that all of them take the fallback or none does
        if wrapping is None:
            raise
        return FallbackModule(module, plan, peers, wrapping, autocast=autocast, reason=str(error))
    state = LocalState(module, step.inputs, step.aliases, plan.mesh, peers, planner.hollow)
    return PlacedModule(plan, planner, peers, state)


def place_in_process(program: Program, module: nn.Module, batch: Batch, plan: Plan) -> PlacedModule:
    """Return `module` as all ranks of a plan on the CPU of this process; they run a program that was captured already.

    Args:
        program: captured from an equal module in training; not changed.
        module: whose weights the ranks take.
        batch: which the program was captured on.
        plan: mesh and options.

    Raises:
        PlanError, PlacementError: the program cannot be placed.
    """
    peers = in_process(plan.mesh, [torch.device("cpu")])
    planner = Planner(module, plan, peers, None, StepMaker(), lifted=False)
    step = planner.adopt(program, batch)
    state = LocalState(module, step.inputs, step.aliases, plan.mesh, peers, planner.hollow)
    return PlacedModule(plan, planner, peers, state)


class PlacedModule(ParallelModule):
    """A module that runs its placed program on the ranks of a mesh; the loss is the serial one.

    Attributes:
        recorder: where set, it notes the parts of a step.
        arrival: where set before a step first runs, is called with the name of each parameter right before the forward
            pass first reads it, and returns once its memory may be read. Not in compiled plans.
    """

    def __init__(self, plan: Plan, planner: Planner[Step], peers: Peers, state: LocalState) -> None:
        super().__init__(plan, peers)
        self._planner = planner
        self._state = state
        self._prepared: dict[int, _Prepared] = {}
        self._last_weight: Tensor | float | None = None
        self.recorder: Recorder | None = None
        self.arrival: Arrival | None = None
        self._register(state.modules)

    @property
    def last_weight(self) -> float:
        """The weight of the last loss; equal to what its sum was divided by.

        Raises:
            PlanError: the loss is no mean that could be read off the program.
        """
        if self._last_weight is None:
            raise PlanError(
                "this loss is not a mean that Paceline can read off the program (a cross-entropy, or the mean of a "
                "tensor), so it cannot weight unequal micro-batches. Use one micro-batch and drop the last smaller "
                "batch, or say that all micro-batches weigh the same (train.loss_weight: equal)."
            )
        return float(self._last_weight)

    @property
    def startups(self) -> list[Startup]:
        """How long each step took to plan, in the order in which they were needed."""
        return self._planner.startups

    def step(self, *args: Any, **kwargs: Any) -> Step:
        """Return what the ranks run for global batches like this one: its two graphs, inputs and placements."""
        return self._planner.step(as_batch(args, kwargs), training=self.training, split=True)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the serial loss of a global batch, which every process is given whole."""
        batch = as_batch(args, kwargs)
        step = self.step(*args, **kwargs)
        return self._run(step, [pieces_of_whole(step, batch, self._state.where(rank)) for rank in self.ranks])

    def local(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a global batch of which this process is given its part only; see `input_shard`."""
        index, count = self.input_shard
        if count == 1:
            return self.forward(*args, **kwargs)
        batch = as_batch(args, kwargs)
        step = self._planner.step(grown(batch, count), training=self.training, split=True)
        return self._run(step, [pieces_of_part(step, batch, self._state.where(rank), index) for rank in self.ranks])

    def whole(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch that is too small to divide: every rank computes all of it."""
        batch = as_batch(args, kwargs)
        step = self._planner.step(batch, training=self.training, split=False)
        return self._run(step, [pieces_of_whole(step, batch, self._state.where(rank)) for rank in self.ranks])

    def _run(self, step: Step, batches: list[dict[str, Tensor]]) -> Tensor:
        prepared = self._prepare(step)
        inputs: RankValues = []
        for batch, pieces, device in zip(batches, self._state.pieces, self._peers.devices, strict=True):
            inputs.append(
                [
                    (batch[item.name].to(device) if item.role is InputRole.BATCH else pieces[item.name]).detach()
                    for item in (placed.item for placed in step.inputs)
                ]
            )
        parameters = [pieces[name] for pieces in self._state.pieces for name in step.gradients]
        seed = self._next_seed()

        def forward() -> RankValues:
            draws = seeded(seed) if prepared.random else contextlib.nullcontext()
            with draws, noting(self.recorder, FORWARD):
                results = prepared.forward(inputs)
            self._keep(step, results)
            return results

        if torch.is_grad_enabled() and prepared.backward is not None:
            outputs = len(step.outputs)
            given = (forward, partial(self._backward, prepared.backward), outputs, *parameters)
            loss: Tensor = _Differentiable.apply(*given)  # type: ignore[no-untyped-call]  # untyped in torch
            return loss
        with torch.no_grad():
            return forward()[0][0]

    def _backward(self, backward: Callable[[RankValues], RankValues], values: RankValues) -> RankValues:
        with noting(self.recorder, BACKWARD):
            return backward(values)

    def _prepare(self, step: Step) -> _Prepared:
        if id(step) not in self._prepared:
            self._check_held(step)
            executor = self._peers.executor
            forward = step.forward if self.arrival is None else with_arrivals(step, step.gradients, self.arrival)
            self._prepared[id(step)] = _Prepared(
                executor.prepare(forward, step.constants),
                None if step.backward is None else executor.prepare(step.backward, step.constants),
                any(is_random(node) for node in step.forward.nodes),
            )
        return self._prepared[id(step)]

    def _check_held(self, step: Step) -> None:
        """Check that a step finds parameters and buffers where the ranks hold them."""
        for placed in step.inputs:
            name = placed.item.name
            is_held = placed.item.role in (InputRole.PARAMETER, InputRole.BUFFER)
            if is_held and placed.placements != self._state.placements(name):
                places = ["/".join(map(str, found)) for found in (placed.placements, self._state.placements(name))]
                raise PlacementError(
                    f"a step wants '{name}' placed as {places[0]}, but ranks hold it as {places[1]}. This is a fault "
                    "of Paceline; please report it."
                )

    def _keep(self, step: Step, results: RankValues) -> None:
        """Store changed buffers and the weight of the loss."""
        self._last_weight = step.weight
        for pieces, values in zip(self._state.pieces, results, strict=True):
            for output, value in zip(step.outputs, values, strict=False):
                if output.role is OutputRole.BUFFER:
                    pieces[output.name].copy_(value)
                elif output.role is OutputRole.WEIGHT:
                    self._last_weight = value.detach()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before. A collective."""
        with noting(self.recorder, NORM):
            return self._clip(max_norm)

    def _clip(self, max_norm: float) -> Tensor:
        squares: dict[tuple[str, ...], list[Tensor]] = {}
        for position, pieces in enumerate(self._state.pieces):
            by_axes: dict[tuple[str, ...], list[Tensor]] = {}
            for name, tensor in pieces.items():
                if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                    by_axes.setdefault(self._state.sharded_axes(name), []).append(tensor.grad)
            for axes, gradients in by_axes.items():
                total = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).square().sum()
                squares.setdefault(axes, [torch.zeros((), dtype=torch.float64, device=total.device)] * len(self.ranks))
                squares[axes][position] = total
        if not squares:
            return torch.zeros(())
        totals = [self._peers.executor.sum(found, axes) for axes, found in sorted(squares.items())]
        norms = [torch.stack([found[p] for found in totals]).sum().sqrt() for p in range(len(self.ranks))]
        if float(norms[0]) > max_norm:  # false for NaN, which then can still be traced to its parameter
            for norm, pieces in zip(norms, self._state.pieces, strict=True):
                gradients = [p.grad for p in pieces.values() if isinstance(p, nn.Parameter) and p.grad is not None]
                torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).to(gradients[0].dtype))
        return norms[0].float()

    def placements(self, name: str) -> tuple[Placement, ...]:
        """Placement of a parameter or buffer along each mesh axis, outermost first."""
        return self._state.placements(name)

    def shards(self) -> Iterator[Shard]:
        """Yield every piece of every parameter and buffer in this process."""
        return self._state.shards()

    @property
    def state_names(self) -> Mapping[str, str]:
        """Every name of the user's `state_dict()`, and the name of the shards that hold it."""
        return self._state.state_names

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the user's `state_dict()` of whole tensors, on the CPU of every rank. A collective."""
        return self._state.gathered()

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load whole tensors under the user's names, given on every rank.

        Raises:
            CheckpointError: names or shapes differ; nothing was changed.
        """
        self._state.load(state)


class _Prepared:
    """A step's graphs, ready to run in this process."""

    def __init__(
        self,
        forward: Callable[[RankValues], RankValues],
        backward: Callable[[RankValues], RankValues] | None,
        random: bool,
    ) -> None:
        self.forward = forward
        self.backward = backward
        self.random = random


class _Differentiable(torch.autograd.Function):
    """Ties the forward and the backward graph of a step to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], RankValues],
        backward: Callable[[RankValues], RankValues],
        outputs: int,
        *parameters: Tensor,
    ) -> Tensor:
        results = run()
        ctx.run_backward = backward
        ctx.saved = [values[outputs:] for values in results]
        loss = results[0][0]
        return loss

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise RuntimeError("backward ran twice through one loss; call the module again, its values were freed")
        (tangent,) = tangents
        for values in saved:
            device = values[0].device if values else tangent.device
            values.append(tangent.to(device))
        gradients = ctx.run_backward(saved)
        return None, None, None, *(gradient for values in gradients for gradient in values)
