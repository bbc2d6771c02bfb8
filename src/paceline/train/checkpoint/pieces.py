"""What the checkpoints see of a module: its shards, and the pieces of state they lead to.

`ShardedModule` is the part of `runtime.module.ParallelModule` that this package uses, so that anything that can say
which pieces of which tensors it holds can be saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.placement.boxes import Patch
from paceline.plan import Mesh


class ShardLike(Protocol):
    """A piece of a parameter or buffer; see `runtime.module.Shard`."""

    @property
    def name(self) -> str:
        """The user's own name."""

    @property
    def rank(self) -> int:
        """Mesh rank that holds the piece."""

    @property
    def tensor(self) -> Tensor:
        """The piece."""

    @property
    def is_parameter(self) -> bool:
        """Whether an optimizer may know it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Which boxes of the global tensor the piece consists of, and where it has them."""

    @property
    def owner(self) -> bool:
        """True on exactly one rank per distinct piece: it saves it."""


class ShardedModule(Protocol):
    """A module whose parameters and buffers are spread over the ranks of a mesh."""

    @property
    def mesh(self) -> Mesh:
        """All ranks."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that live in this process."""

    @property
    def state_names(self) -> Mapping[str, str]:
        """Every name of the user's `state_dict()` and the name of the shards that hold it (tied names share one)."""

    def shards(self) -> Iterable[ShardLike]:
        """Every parameter and buffer of every rank of this process."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """The user's `state_dict()`, gathered on every rank, on the CPU. A collective."""


@dataclass(frozen=True)
class Held:
    """A piece of a tensor of the checkpoint, as one rank of this process holds it.

    Attributes:
        key: name of the tensor in the checkpoint.
        rank: mesh rank.
        tensor: the piece.
        patches: which boxes of the global tensor it consists of.
        shape: global shape.
        owner: whether this rank is the one that writes it.
    """

    key: str
    rank: int
    tensor: Tensor
    patches: tuple[Patch, ...]
    shape: tuple[int, ...]
    owner: bool


def model_key(name: str) -> str:
    """Return the name in a checkpoint of the parameter or buffer `name`."""
    return f"model/{name}"


def saved_shards(module: ShardedModule) -> list[ShardLike]:
    """Return the shards that the user's `state_dict()` has, that is all but non-persistent buffers."""
    names = set(module.state_names.values())
    return [shard for shard in module.shards() if shard.name in names]


def model_pieces(module: ShardedModule) -> list[Held]:
    """Return the pieces of parameters and persistent buffers that live in this process."""
    return [
        Held(model_key(shard.name), shard.rank, shard.tensor, shard.patches, tuple(shard.shape), shard.owner)
        for shard in saved_shards(module)
    ]
