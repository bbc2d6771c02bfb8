"""What a module that trains on the ranks of a mesh can do, whatever makes it run there.

`module.PlacedModule` runs a placed program, equal to serial; `fallback.FallbackModule` wraps what cannot be captured.
Training loops, checkpoints and users know this interface only.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.placement.placements import Placement
from paceline.plan import Plan
from paceline.program.capture import Batch
from paceline.runtime.peers import Peers
from paceline.runtime.planning import Startup
from paceline.runtime.state import Shard, Tree


class Portion(Protocol):
    """A micro-batch of a step.

    Attributes:
        batch: this process's samples: keyword arguments (a dictionary) or positional ones (a tuple).
        whole: every process holds all samples of the micro-batch, because there are too few to divide.
        samples: samples of the micro-batch over all ranks.
    """

    @property
    def batch(self) -> Batch: ...  # noqa: D102  # the class tells
    @property
    def whole(self) -> bool: ...  # noqa: D102  # the class tells
    @property
    def samples(self) -> int: ...  # noqa: D102  # the class tells


class Accumulated(NamedTuple):
    """The mean loss over several micro-batches, and the weight of that mean."""

    loss: float
    weight: float


class ParallelModule(nn.Module, ABC):
    """A user's module on the ranks of a mesh.

    `parameters()` are the shards of the ranks in this process, under the user's own names (prefixed `rank0.`, `rank1.`,
    ... when several ranks live here). Any `torch.optim` optimizer works on them.

    Attributes:
        plan: what is executed.
        mesh: its axes.
        ranks: the ranks of the mesh that live in this process.
        input_shard: (index, count): which contiguous part of the batch `local` takes in this process; ranks that differ
            only along axes that split no samples (tp, sp, hw) take the same one.
        pass_seconds: what the passes of the last `accumulate` took, by name; nothing where
            they are not one after the other, as in a pipeline.
        last_weight: the weight of the mean that the last loss was (its number of samples or valid tokens).
    """

    def __init__(self, plan: Plan, peers: Peers) -> None:
        super().__init__()
        self.plan = plan
        self.mesh = plan.mesh
        self.ranks = peers.executor.ranks
        self._peers = peers
        self._seed: int | None = None
        self._calls = 0
        base_seed = torch.tensor(torch.initial_seed() % (1 << 62), device=peers.devices[0])
        peers.broadcast(base_seed)
        self.pass_seconds: dict[str, float] = {}
        self._base_seed = int(base_seed)  # read once: a GPU would be waited for at every call

    def _register(self, trees: list[Tree]) -> None:
        """Make the pieces of each rank here the parameters and buffers of this module."""
        if len(self.ranks) == 1:
            for name, child in trees[0].named_children():
                self.add_module(name, child)
            for name, parameter in trees[0].named_parameters(recurse=False):
                self.register_parameter(name, parameter)
            for name, buffer in trees[0].named_buffers(recurse=False):
                self.register_buffer(name, buffer)
        else:
            for rank, tree in zip(self.ranks, trees, strict=True):
                self.add_module(f"rank{rank}", tree)

    @property
    def peers(self) -> Peers:
        """The ranks of this process, and the way to the others."""
        return self._peers

    @property
    def input_shard(self) -> tuple[int, int]:
        """(index, count) of this process's part of a batch that is split."""
        return (0, 1) if self._peers.alone else (self.mesh.batch_part(self.ranks[0]), self.mesh.batch_parts)

    def seed(self, value: int) -> None:
        """Set the seed of the random operators of the next call; equal on all ranks."""
        self._seed = value

    def _next_seed(self) -> int:
        """Return the seed of the call that begins; equal on all ranks."""
        seed = self._base_seed + self._calls if self._seed is None else self._seed
        self._seed, self._calls = None, self._calls + 1
        return seed

    def accumulate(self, portions: Sequence[Portion], seeds: Sequence[int], *, equal: bool) -> Accumulated:
        """Leave the gradient of the mean loss over all portions together; return that loss and its weight.

        A mean of means is not the mean when micro-batches hold unequal numbers of tokens, so each loss counts by its
        weight, relative to the first one's (which keeps gradients in range, and exact when weights are equal).

        Args:
            portions: the micro-batches of a step.
            seeds: of the random operators of each.
            equal: all count alike, whatever their losses are means over.

        Raises:
            PlanError: there are several, and nobody knows what their losses count by.
        """
        losses: list[Tensor] = []
        weights: list[float] = []
        forward = backward = 0.0
        for portion, seed in zip(portions, seeds, strict=True):
            self.seed(seed)
            began = time.perf_counter()
            loss = self.loss_of(portion)
            weight = 1.0 if equal else self.weight_of(portion, of=len(portions))
            forward += time.perf_counter() - began
            if weight == 0 and len(portions) > 1:
                continue  # no valid token on any rank: a loss of 0/0 that counts for nothing
            losses.append(loss.detach())
            weights.append(weight)
            began = time.perf_counter()
            scaled = loss if len(weights) == 1 else loss * (weight / weights[0])
            scaled.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            backward += time.perf_counter() - began
        self.pass_seconds = {"forward": forward, "backward": backward}
        if len(weights) <= 1:
            return Accumulated(float(losses[0]), weights[0]) if losses else Accumulated(math.nan, 0.0)
        total = sum(weights)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, weights[0] / total)
        return Accumulated(math.fsum(w * float(x) for w, x in zip(weights, losses, strict=True)) / total, total)

    def mean_loss(self, portions: Iterable[Portion], *, equal: bool) -> Accumulated:
        """Return the mean loss over all portions, without gradients, and its weight; NaN and 0 where nothing counts."""
        loss, total = 0.0, 0.0
        for portion in portions:
            value = float(self.loss_of(portion))
            weight = 1.0 if equal else self.weight_of(portion, of=1)
            if weight > 0:
                loss += value * weight
                total += weight
        return Accumulated(loss / total if total else math.nan, total)

    def loss_of(self, portion: Portion) -> Tensor:
        """The loss of a portion: divided among the ranks, or computed whole on each when it cannot be."""
        forward = self.whole if portion.whole else self.local
        batch = portion.batch
        return forward(**batch) if isinstance(batch, dict) else forward(*batch)

    def weight_of(self, portion: Portion, of: int) -> float:
        """What the last loss counts by, among `of` portions."""
        try:
            return self.last_weight
        except PlanError:
            if of > 1:
                raise
            return float(portion.samples)  # alone it needs no weight; this one is for the reports

    @property
    @abstractmethod
    def last_weight(self) -> float:
        """The weight of the last loss; equal to what its sum was divided by.

        Raises:
            PlanError: the loss is no mean that could be read off the program.
        """

    @property
    @abstractmethod
    def startups(self) -> list[Startup]:
        """How long each step took to plan, in the order in which they were needed."""

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a global batch, which every process is given whole."""

    @abstractmethod
    def local(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a global batch of which this process is given its part only; see `input_shard`."""

    @abstractmethod
    def whole(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch that is too small to divide: every rank computes all of it."""

    @abstractmethod
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before. A collective."""

    @abstractmethod
    def placements(self, name: str) -> tuple[Placement, ...]:
        """Placement of a parameter or buffer along each mesh axis, outermost first."""

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """Yield every piece of every parameter and buffer in this process."""

    @property
    @abstractmethod
    def state_names(self) -> Mapping[str, str]:
        """Every name of the user's `state_dict()`, and the name of the shards that hold it."""

    @abstractmethod
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the user's `state_dict()` of whole tensors, on the CPU of every rank. A collective."""

    @abstractmethod
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load whole tensors under the user's names, given on every rank.

        Raises:
            CheckpointError: names or shapes differ; nothing was changed.
        """


def as_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """Return the arguments of a call as a batch.

    Raises:
        PlanError: there are both positional and keyword arguments.
    """
    if args and kwargs:
        raise PlanError("give the batch as positional or as keyword arguments, not both: programs name inputs by them.")
    return kwargs if kwargs else args


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from generators seeded so, and leave the global ones as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
