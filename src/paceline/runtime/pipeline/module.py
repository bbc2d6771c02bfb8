"""A module whose ranks are the stages of a pipeline: one call runs a whole schedule, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
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
from paceline.runtime.pipeline.asynchronous import Asynchronous, AsynchronousResult, Update, check_asynchronous
from paceline.runtime.pipeline.pieces import count_for, micro_batch_seeds, micro_batches
from paceline.runtime.pipeline.ranks import StageRanks
from paceline.runtime.pipeline.reduce import finished_gradients
from paceline.runtime.pipeline.scheduling import Schedules, edges_of
from paceline.runtime.pipeline.shares import Shares
from paceline.runtime.pipeline.stage_rank import StageRank
from paceline.runtime.pipeline.step import PipelineStep
from paceline.runtime.pipeline.walk import MicroBatch, Observe, Walk
from paceline.runtime.planning import Planner, Startup
from paceline.runtime.state import Shard
from paceline.schedule import Action, Edges
from paceline.trace import GRADIENTS, NORM, Recorder, noting

_EVALUATED = 4
"""So many micro-batches for each pipeline rank are evaluated at a time."""


class PipelinedModule(ParallelModule):
    """A module whose layers lie on different ranks; the loss is the serial one, on every rank.

    A call in training runs the forward and the backward pass of all its micro-batches, and `backward()` of its loss
    hands the gradients over. So an ordinary training loop trains it.

    Attributes:
        observe: where set, it is told of each action that ranks in this process performed.
        recorder: where set, it notes the actions and the other parts of a step.
    """

    def __init__(
        self, plan: Plan, planner: Planner[PipelineStep], peers: Peers, ranks: StageRanks, schedules: Schedules
    ) -> None:
        super().__init__(plan, peers)
        self._planner = planner
        self._stage_ranks = ranks
        self._schedules = schedules
        self._last_weight: float | None = None
        self.observe: Observe | None = None
        self.recorder: Recorder | None = None
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
        given = [self._micro_batch(portion, seed) for portion, seed in zip(portions, seeds, strict=True)]
        loss = self._loss(given, equal=equal)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        if equal:
            return Accumulated(loss.item(), float(len(portions)))
        weight = self._last_weight
        return Accumulated(loss.item(), float(portions[0].samples) if weight is None else weight)

    def mean_loss(self, portions: Iterable[Portion], *, equal: bool) -> Accumulated:
        """Return the mean loss over all portions, without gradients; a few flow through the stages at a time."""
        waiting, loss, total = iter(portions), 0.0, 0.0
        while flowing := list(islice(waiting, _EVALUATED * self.mesh.stage_ranks)):
            given = [self._micro_batch(portion, self._next_seed()) for portion in flowing]
            told = equal or all(each.step.counts or each.step.weight is not None for each in given)
            for group in [given] if told else [[each] for each in given]:
                value = float(self._loss(group, equal=equal))
                weight = self._last_weight if not equal else float(len(group))
                weight = float(sum(p.samples for p in flowing)) / len(flowing) if weight is None else weight
                if weight > 0:
                    loss += value * weight
                    total += weight
        return Accumulated(loss / total if total else math.nan, total)

    @property
    def trained_by_stage(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters that each stage makes gradients of."""
        return self._stage_ranks.trained_by_stage

    @property
    def is_asynchronous(self) -> bool:
        """Whether the schedule updates parameters while micro-batches are in flight."""
        return self._schedules.is_asynchronous

    def updates(self, micro_batches: int) -> int:
        """Return how often a stage is updated in a batch of so many micro-batches, under an asynchronous schedule."""
        ranks = max(map(len, self._schedules.replicas))
        return max(1, micro_batches // (self._schedules.group(micro_batches) * ranks))

    def train_batches(
        self,
        batches: Sequence[Sequence[Portion]],
        seeds: Sequence[Sequence[int]],
        update: Update,
        *,
        equal: bool = False,
    ) -> AsynchronousResult:
        """Train on batches that follow each other without draining; for asynchronous schedules.

        Args:
            batches: equally many micro-batches each.
            seeds: of their random operators.
            update: called when a stage's parameters have their gradients, to change them (an optimizer's `step`); other
                parameters have none then.
            equal: micro-batches of an update count alike, whatever their losses are means over.

        Raises:
            PlanError, ScheduleError: the batches do not fit the schedule, or stages share a parameter.
        """
        check_asynchronous(self._stage_ranks)
        with torch.no_grad():
            given = [
                self._micro_batch(portion, seed)
                for portions, of_batch in zip(batches, seeds, strict=True)
                for portion, seed in zip(portions, of_batch, strict=True)
            ]
            count = len(batches[0])
            schedule = self._schedules.training(count, _edges(given), batches=len(batches))
            group = self._schedules.group(count)
            shares = Shares([micro_batch.step for micro_batch in given], equal=equal, group=group)
            recompute = frozenset(self.plan.pipeline.recompute)
            runs = [
                Asynchronous(rank, schedule, self._stage_ranks.portion(given, rank), shares, update, recompute)
                for rank in self._stage_ranks.here
            ]
            self._stage_ranks.perform([run.walk for run in runs])
            found = self._stage_ranks.total_losses([run.walk for run in runs], count)
        accumulated = [
            Accumulated(loss, float(sum(p.samples for p in portions)) if weight is None else weight)
            for portions, (loss, weight) in zip(batches, found, strict=True)
        ]
        return AsynchronousResult(accumulated, [entry for run in runs for entry in run.log])

    def _micro_batch(self, portion: Portion, seed: int) -> MicroBatch:
        if portion.whole:
            return self._whole(portion.batch, seed, split=False)
        return self._part(portion.batch, seed)

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
        if differentiates and self.is_asynchronous:
            raise PlanError(
                f"the schedule {self.plan.pipeline.schedule} updates parameters while micro-batches are in flight, so "
                "there is no gradient to hand over: call train_batches (paceline train does), or take 1f1b."
            )
        with torch.no_grad():
            walks = self._walk(given, differentiates, equal)
            with noting(self.recorder, GRADIENTS):
                ((value, self._last_weight),) = self._stage_ranks.total_losses(walks, len(given))
                loss = torch.tensor(value, dtype=given[0].step.loss_dtype, device=self._peers.devices[0])
                if not differentiates:
                    return loss
                found = finished_gradients(self._stage_ranks, walks, given[0].step)
        if not found:  # no stage with parameters lies here, or no micro-batch counts
            return loss.requires_grad_()
        results = (loss, list(found.values()), *found)
        computed: Tensor = _Computed.apply(*results)  # type: ignore[no-untyped-call]  # untyped in torch
        return computed

    def _walk(self, given: Sequence[MicroBatch], differentiates: bool, equal: bool) -> list[Walk]:
        shares = Shares([micro_batch.step for micro_batch in given], equal=equal)
        edges = _edges(given)
        make = self._schedules.training if differentiates else self._schedules.evaluation
        schedule = make(len(given), edges)
        recompute = frozenset(self.plan.pipeline.recompute) if differentiates else frozenset()
        observe = self.observe if self.recorder is None else self._recorded
        walks = [
            Walk(rank, schedule, self._stage_ranks.portion(given, rank), shares, recompute, observe=observe)
            for rank in self._stage_ranks.here
        ]
        self._stage_ranks.perform(walks)
        return walks

    def _recorded(self, walk: Walk, action: Action, began: float, ended: float) -> None:
        """Note an action of a rank in this process."""
        if self.recorder is not None:
            self.recorder.note(str(action), began, ended, self._stage_ranks.first_of(walk.rank.number))
        if self.observe is not None:
            self.observe(walk, action, began, ended)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before. A collective."""
        with noting(self.recorder, NORM):
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


def _edges(given: Sequence[MicroBatch]) -> Edges:
    return edges_of(*(micro_batch.step.pipeline for micro_batch in given))


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
