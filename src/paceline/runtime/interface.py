"""What a module that trains on the ranks of a mesh can do, whatever makes it run there.

`module.PlacedModule` runs a placed program, equal to serial; `fallback.FallbackModule` wraps what cannot be captured.
Training loops, checkpoints and users know this interface only.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.placement.placements import Placement
from paceline.plan import Plan
from paceline.runtime.peers import Peers
from paceline.runtime.planning import Startup
from paceline.runtime.state import Shard, Tree


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


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from generators seeded so, and leave the global ones as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
