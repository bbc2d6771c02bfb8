"""A module whose ranks are the stages of a pipeline: one call runs a whole schedule, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.placement.placements import Placement
from paceline.plan import Plan
from paceline.program.capture import Batch
from paceline.runtime.batches import grown, pieces_of_part, pieces_of_whole
from paceline.runtime.interface import Accumulated, ParallelModule, Portion, as_batch
from paceline.runtime.peers import Peers
from paceline.runtime.pipeline.pieces import count_for, micro_batch_seeds, micro_batches
from paceline.runtime.pipeline.ranks import StageRanks
from paceline.runtime.pipeline.reduce import finished_gradients
from paceline.runtime.pipeline.scheduling import Schedules, edges_of
from paceline.runtime.pipeline.shares import Shares
from paceline.runtime.pipeline.stage_rank import StageRank
from paceline.runtime.pipeline.step import PipelineStep
from paceline.runtime.pipeline.walk import MicroBatch, Walk
from paceline.runtime.planning import Planner, Startup
from paceline.runtime.state import Shard


class PipelinedModule(ParallelModule):
    """A module whose layers lie on different ranks; the loss is the serial one, on every rank.

    A call in training runs the forward and the backward pass of all its micro-batches, and `backward()` of its loss
    hands the gradients over. So an ordinary training loop trains it.
    """

    def __init__(
        self, plan: Plan, planner: Planner[PipelineStep], peers: Peers, ranks: StageRanks, schedules: Schedules
    ) -> None:
        super().__init__(plan, peers)
        self._planner = planner
        self._stage_ranks = ranks
        self._schedules = schedules
        self._last_weight: float | None = None
        self._register(ranks.trees)

    @property
    def last_weight(self) -> float:
        """The weight of the last loss; equal to what its sum was divided by.

        Raises:
            PlanError: the loss is no mean that could be read off the program.
        """
        if self._last_weight is None:
            raise PlanError(
                "this loss is not a mean that Paceline can read off the program, so nobody knows what it counts by; "
                "say that all micro-batches weigh the same (train.loss_weight: equal)."
            )
        return self._last_weight

    @property
    def startups(self) -> list[Startup]:
        """How long each step took to plan, in the order in which they were needed."""
        return self._planner.startups

    def steps(self, *args: Any, **kwargs: Any) -> list[PipelineStep]:
        """Return the stages for each micro-batch of a global batch like this one."""
        return [self._planner.step(piece, training=self.training, split=True) for piece in self._pieces(args, kwargs)]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the serial loss of a global batch, which every process is given whole."""
        pieces = self._pieces(args, kwargs)
        seeds = micro_batch_seeds(self._next_seed(), len(pieces))
        return self._loss([self._whole(piece, seed, split=True) for piece, seed in zip(pieces, seeds, strict=True)])

    def local(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a global batch of which this process is given its part only; see `input_shard`."""
        batch = as_batch(args, kwargs)
        pieces = micro_batches(batch, count_for(batch, self.plan, 1))
        seeds = micro_batch_seeds(self._next_seed(), len(pieces))
        return self._loss([self._part(piece, seed) for piece, seed in zip(pieces, seeds, strict=True)])

    def _pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        batch, parts = as_batch(args, kwargs), self.mesh.batch_parts
        return micro_batches(batch, count_for(batch, self.plan, parts), parts)

    def whole(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch that is too small to divide: every rank of a stage computes all of it."""
        return self._loss([self._whole(as_batch(args, kwargs), self._next_seed(), split=False)])

    @property
    def here(self) -> list[StageRank]:
        """The pipeline ranks in this process."""
        return self._stage_ranks.here

    def accumulate(self, portions: Sequence[Portion], seeds: Sequence[int], *, equal: bool) -> Accumulated:
        """Leave the gradient of the mean loss over all portions together, each of which flows as one micro-batch."""
        given = []
        for portion, seed in zip(portions, seeds, strict=True):
            given.append(
                self._whole(portion.batch, seed, split=False) if portion.whole else self._part(portion.batch, seed)
            )
        loss = self._loss(given, equal=equal)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        if equal:
            return Accumulated(loss.item(), float(len(portions)))
        weight = self._last_weight
        return Accumulated(loss.item(), float(portions[0].samples) if weight is None else weight)

    def _whole(self, batch: Batch, seed: int, *, split: bool) -> MicroBatch:
        step = self._planner.step(batch, training=self.training, split=split)
        pieces = [pieces_of_whole(step, batch, where) for where in self._stage_ranks.places]
        return MicroBatch(step, pieces, seed)

    def _part(self, batch: Batch, seed: int) -> MicroBatch:
        index, count = self.input_shard
        if count == 1:
            return self._whole(batch, seed, split=True)
        step = self._planner.step(grown(batch, count), training=self.training, split=True)
        pieces = [pieces_of_part(step, batch, where, index) for where in self._stage_ranks.places]
        return MicroBatch(step, pieces, seed)

    def _loss(self, given: Sequence[MicroBatch], *, equal: bool = False) -> Tensor:
        """Run a schedule on micro-batches; where gradients are wanted, the loss knows them."""
        differentiates = torch.is_grad_enabled() and self.training
        with torch.no_grad():
            walks = self._walk(given, differentiates, equal)
            loss, self._last_weight = self._stage_ranks.total_loss(walks, given[0].step.loss_dtype)
            if not differentiates:
                return loss
            found = finished_gradients(self._stage_ranks, walks, given[0].step)
        parameters = list(found)
        computed: Tensor = _Computed.apply(loss, list(found.values()), *parameters)  # type: ignore[no-untyped-call]
        return computed

    def _walk(self, given: Sequence[MicroBatch], differentiates: bool, equal: bool) -> list[Walk]:
        shares = Shares([micro_batch.step for micro_batch in given], equal=equal)
        edges = edges_of(given[0].step.pipeline)
        make = self._schedules.training if differentiates else self._schedules.evaluation
        schedule = make(len(given), edges)
        recompute = frozenset(self.plan.pipeline.recompute) if differentiates else frozenset()
        walks = [
            Walk(rank, schedule, self._stage_ranks.portion(given, rank), shares, recompute)
            for rank in self._stage_ranks.here
        ]
        self._stage_ranks.perform(walks)
        return walks

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before. A collective."""
        return self._stage_ranks.clip(max_norm)

    def placements(self, name: str) -> tuple[Placement, ...]:
        """Placement of a parameter or buffer along each mesh axis, outermost first; whole along `pp`."""
        return self._stage_ranks.placements(name)

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that have a parameter or buffer."""
        return self._stage_ranks.holders(name)

    def shards(self) -> Iterator[Shard]:
        """Yield every piece of every parameter and buffer in this process."""
        return self._stage_ranks.shards()

    @property
    def state_names(self) -> Mapping[str, str]:
        """Every name of the user's `state_dict()`, and the name of the shards that hold it."""
        return self._stage_ranks.here[0].state.state_names

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the user's `state_dict()` of whole tensors, on the CPU of every rank. A collective."""
        return self._stage_ranks.gathered()

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load whole tensors under the user's names, given on every rank.

        Raises:
            CheckpointError: names or shapes differ; nothing was changed.
        """
        for rank in self._stage_ranks.here:
            rank.state.load(state)


class _Computed(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("backward ran twice through one loss; call the module again, its values were freed")
        (tangent,) = tangents
        if tangent.device.type != "cpu" or float(tangent) != 1.0:
            gradients = [gradient * tangent.to(gradient.device, gradient.dtype) for gradient in gradients]
        return None, None, *gradients
