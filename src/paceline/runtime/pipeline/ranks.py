"""The pipeline ranks of this process: one under a launcher, all of them where they live in one process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.placement.placements import REPLICATE, Placement
from paceline.plan import Axis, Plan
from paceline.program.program import InputRole
from paceline.runtime.executor import ProcessExecutor
from paceline.runtime.hollow import Hollow
from paceline.runtime.inprocess import InProcessExecutor
from paceline.runtime.peers import Peers
from paceline.runtime.pipeline.channels import Channel, Mailboxes, ProcessChannel
from paceline.runtime.pipeline.directed import DirectedGroups, directed_groups, needs_directions
from paceline.runtime.pipeline.stage_rank import StageRank
from paceline.runtime.pipeline.step import PipelineStep
from paceline.runtime.pipeline.walk import MicroBatch, Walk
from paceline.runtime.pipeline.wire import wire_named
from paceline.runtime.state import LocalState, Shard, Tree

_PP = Axis.PP.value


class StageRanks:
    """The pipeline ranks here, and what they do together with those elsewhere.

    Args:
        module: where the weights come from.
        step: of the module, with the stages and the placements of parameters.
        plan: with the axis `pp`.
        peers: the ranks of the whole mesh.
        replicas: for each stage, the pipeline ranks that compute it.
        hollow: gives back the memory of what the stages here do not need.

    Attributes:
        here: the pipeline ranks in this process.
        trained_by_stage: names of the parameters that each stage makes gradients of.
    """

    def __init__(
        self,
        module: nn.Module,
        step: PipelineStep,
        plan: Plan,
        peers: Peers,
        replicas: tuple[tuple[int, ...], ...],
        hollow: Hollow,
    ) -> None:
        self._mesh = plan.mesh
        self._inner = plan.mesh.inner
        self._peers = peers
        self._holders = _holders(module, step, replicas)
        self.trained_by_stage = tuple(tuple(stage.gradients) for stage in step.pipeline.stages)
        self._trained = dict.fromkeys(name for stage in step.pipeline.stages for name in stage.gradients)
        self._users = Counter(name for stage in step.pipeline.stages for name in _needed(step, stage.index))
        self._dtypes = {name: tensor.dtype for name, tensor in _tensors(module).items()}
        self._global = {self._mesh.split_rank(rank): rank for rank in range(self._mesh.size)}
        numbers = sorted({self._mesh.split_rank(rank)[0] for rank in peers.executor.ranks})
        boxes = Mailboxes(wire_named(plan.pipeline.wire)) if peers.alone else None
        self.here = [self._rank(number, module, step, plan, replicas, hollow, boxes) for number in numbers]

    def _rank(
        self,
        number: int,
        module: nn.Module,
        step: PipelineStep,
        plan: Plan,
        replicas: tuple[tuple[int, ...], ...],
        hollow: Hollow,
        boxes: Mailboxes | None,
    ) -> StageRank:
        inner_peers = self._inner_peers(number, plan)
        channel: Channel
        if boxes is not None:
            channel = boxes
        else:
            group = self._peers.groups[_PP].group
            assert group is not None
            directed = self._directed(number, step, replicas) if needs_directions(group) else None
            channel = ProcessChannel(group, self._peers.devices[0], wire_named(plan.pipeline.wire), directed)
        state = LocalState(
            module,
            step.inputs,
            step.aliases,
            self._inner,
            inner_peers,
            hollow,
            keep={name for name, holders in self._holders.items() if number in holders},
            takes_over=boxes is None,
        )
        stages = tuple(stage for stage, ranks in enumerate(replicas) if number in ranks)
        return StageRank(number, stages, self._inner, inner_peers.executor, inner_peers.devices, state, channel)

    def _directed(self, number: int, step: PipelineStep, replicas: tuple[tuple[int, ...], ...]) -> DirectedGroups:
        """A group for each way between pipeline ranks that send each other something."""
        edges = (*step.pipeline.forward_edges, *step.pipeline.backward_edges)
        pairs = {(a, b) for source, target in edges for a in replicas[source] for b in replicas[target]}
        pairs |= {(a, b) for holders in self._holders.values() for a in holders for b in holders}
        _, inner = self._mesh.split_rank(self._peers.executor.ranks[0])
        return directed_groups(
            pairs, number, {rank: self._global[rank, inner] for rank in range(self._mesh.stage_ranks)}
        )

    def _inner_peers(self, number: int, plan: Plan) -> Peers:
        """The ranks of the inner mesh that stand at one place of the pipeline."""
        if not self._peers.alone:
            _, inner = self._mesh.split_rank(self._peers.executor.ranks[0])
            executor = ProcessExecutor(inner, dict(self._peers.groups), mesh=self._inner, compile=plan.compile)
            return replace(self._peers, executor=executor)
        devices = tuple(self._peers.devices[self._global[number, inner]] for inner in range(self._inner.size))
        return replace(self._peers, executor=InProcessExecutor(self._inner, devices), devices=devices)

    @property
    def trees(self) -> list[Tree]:
        """The pieces of each rank of the mesh that lives here, in the order of ranks."""
        found = {
            self._global[rank.number, inner]: tree
            for rank in self.here
            for inner, tree in zip(rank.executor.ranks, rank.state.modules, strict=True)
        }
        return [found[number] for number in sorted(found)]

    @property
    def places(self) -> list[list[tuple[int, int]]]:
        """(index, ranks) along each inner axis, of each rank of the inner mesh that lives here."""
        rank = self.here[0]
        return [rank.state.where(inner) for inner in rank.executor.ranks]

    @property
    def tied_parameters(self) -> dict[str, frozenset[int]]:
        """Trained parameters that several stages need, and the ranks of these; in the same order everywhere."""
        return {name: frozenset(self._holders[name]) for name in self._trained if self._users[name] > 1}

    def first_of(self, number: int) -> int:
        """Return the first rank of the mesh in this process that stands at a place of the pipeline."""
        here = [rank for rank in self._peers.executor.ranks if self._mesh.split_rank(rank)[0] == number]
        return here[0]

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the pipeline ranks that have a parameter or buffer, in order."""
        return self._holders[name]

    def portion(self, given: Sequence[MicroBatch], rank: StageRank) -> list[MicroBatch]:
        """Return micro-batches with their pieces on the devices of a pipeline rank."""
        return [
            replace(
                micro_batch,
                pieces=[
                    {name: piece.to(device) for name, piece in pieces.items()}
                    for pieces, device in zip(micro_batch.pieces, rank.devices, strict=True)
                ],
            )
            for micro_batch in given
        ]

    def perform(self, walks: Sequence[Walk]) -> None:
        """Walk to the end: one rank alone, or all ranks of this process in turns, each as far as it can go."""
        while any(not walk.is_over for walk in walks):
            moved = False
            for walk in walks:
                while not walk.is_over and walk.can_go_on():
                    walk.go_on()
                    moved = True
            assert moved, "a schedule that was proven does not stop"
        for walk in walks:
            walk.finish()

    def total_losses(self, walks: Sequence[Walk], group: int) -> list[tuple[float, float | None]]:
        """Return the loss and its weight of each `group` micro-batches, on every rank; a collective."""
        groups = len(walks[0].micro_batches) // group
        told = sum((_totals(walk, group) for walk in walks), torch.zeros(groups, 4, dtype=torch.float64))
        told = told.to(self._peers.devices[0])
        if not self._peers.alone:
            dist.all_reduce(told, group=self._peers.groups[_PP].group)
        return [
            (loss / shares if shares else math.nan, None if unknown else weight)
            for loss, shares, weight, unknown in told.tolist()
        ]

    def shards(self) -> Iterator[Shard]:
        """Yield every piece in this process; of copies on several pipeline ranks, the first one's counts."""
        for rank in self.here:
            for shard in rank.state.shards():
                owner = shard.owner and self._holders[shard.name][0] == rank.number
                yield replace(shard, rank=self._global[rank.number, shard.rank], owner=owner)

    def placements(self, name: str) -> tuple[Placement, ...]:
        """Placement along each axis of the mesh; whole along that of the pipeline."""
        inner = dict(zip(self._inner.names, self.here[0].state.placements(name), strict=True))
        return tuple(inner.get(axis, REPLICATE) for axis in self._mesh.names)

    def gathered(self) -> dict[str, Tensor]:
        """Return whole tensors on the CPU under all names of the user's `state_dict()`; a collective."""
        whole: dict[str, Tensor] = {}
        names = self.here[0].state.state_names
        for name in dict.fromkeys(names.values()):
            first = self._holders[name][0]
            holder = next((rank for rank in self.here if rank.number == first), None)
            if holder is not None:
                found = holder.state.gather(name).contiguous()
            else:
                like = self.here[0].state
                found = torch.empty(like.shape(name), dtype=self._dtypes[name], device=self._peers.devices[0])
            if not self._peers.alone:
                dist.broadcast(found, group=self._peers.groups[_PP].group, group_src=first)
            whole[name] = found.cpu()
        return {name: whole[original] for name, original in names.items()}

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before. A collective."""
        total = sum((self._square(rank) for rank in self.here), torch.zeros((), dtype=torch.float64))
        total = total.to(self._peers.devices[0])
        if not self._peers.alone:
            dist.all_reduce(total, group=self._peers.groups[_PP].group)
        norm = total.sqrt()
        if float(norm) > max_norm:  # false for NaN, which then can still be traced to its parameter
            for rank in self.here:
                for pieces in rank.state.pieces:
                    found = [p.grad for p in pieces.values() if isinstance(p, nn.Parameter) and p.grad is not None]
                    if found:
                        torch._foreach_mul_(found, (max_norm / (norm + 1e-6)).to(found[0].device, found[0].dtype))
        return norm.float()

    def _square(self, rank: StageRank) -> Tensor:
        """The squared norm of the gradients that count on a pipeline rank, over its inner mesh."""
        squares: dict[tuple[str, ...], list[Tensor]] = {}
        zero = torch.zeros((), dtype=torch.float64, device=self._peers.devices[0])
        for name in self._users:
            if self._holders[name][0] == rank.number:
                axes = rank.state.sharded_axes(name)
                found = squares.setdefault(axes, [zero] * len(rank.state.pieces))
                for position, pieces in enumerate(rank.state.pieces):
                    gradient = pieces[name].grad
                    if gradient is not None:
                        found[position] = found[position] + gradient.double().square().sum().to(zero.device)
        totals = [rank.executor.sum(found, axes)[0] for axes, found in sorted(squares.items())]
        return torch.stack(totals).sum().cpu() if totals else torch.zeros((), dtype=torch.float64)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _needed(step: PipelineStep, stage: int) -> list[str]:
    """The parameters that a stage reads or makes a gradient of."""
    read = step.reads(stage, InputRole.PARAMETER).values()
    return list(dict.fromkeys([*read, *step.pipeline.stages[stage].gradients]))


def _holders(
    module: nn.Module, step: PipelineStep, replicas: tuple[tuple[int, ...], ...]
) -> dict[str, tuple[int, ...]]:
    """For each parameter and buffer, the pipeline ranks whose stages need it; what nobody needs lies on the first."""
    found: dict[str, set[int]] = {name: set() for name in _tensors(module)}
    for stage, ranks in enumerate(replicas):
        for name in (*_needed(step, stage), *step.reads(stage, InputRole.BUFFER).values()):
            found[name].update(ranks)
    return {name: tuple(sorted(ranks)) or (0,) for name, ranks in found.items()}


def _totals(walk: Walk, group: int) -> Tensor:
    """For each `group` micro-batches: sums of losses by share, of shares, of weights, and of weights nobody knows."""
    told = torch.zeros(len(walk.micro_batches) // group, 4, dtype=torch.float64)
    for micro_batch, loss in walk.losses.items():
        share, weight = walk.found_shares[micro_batch], walk.weights[micro_batch]
        row = told[micro_batch // group]
        if share:
            row[0] += share * float(loss)
        row[1] += share
        row[2] += 0.0 if weight is None else weight
        row[3] += weight is None
    return told
