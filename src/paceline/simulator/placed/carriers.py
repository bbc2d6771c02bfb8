"""What carries tensors between ranks, as far as memory goes: stand-ins that take and give tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor

from paceline.plan import Mesh
from paceline.program.fake import storage_key
from paceline.runtime.binding import AxisGroup
from paceline.shm import Exchange


class Carrier(Enum):
    """What carries tensors between ranks."""

    FUNCTIONAL = "functional"
    """Functional collectives of `torch.distributed`: results are new, buckets are summed in place."""
    SHARED_MEMORY = "shared memory"
    """Gradients are made in their bucket, and parameters are looked at where they lie."""


def groups_of(mesh: Mesh, carrier: Carrier) -> dict[str, AxisGroup]:
    """Return what a graph is bound to along each axis, for rank 0."""
    if carrier is Carrier.FUNCTIONAL:
        return {name: AxisGroup(name, 0) for name in mesh.names}
    return {name: SharedGroup(name, 0, exchange=SharedRoom(size)) for name, size in mesh.axes}


@dataclass(frozen=True)
class SharedGroup(AxisGroup):
    """Ranks along an axis that share memory."""

    exchange: SharedRoom | None = None

    @property
    def shared(self) -> Exchange | None:
        """The stand-in, which has the interface."""
        return cast(Exchange, self.exchange)


class SharedRoom:
    """Stands in for `shm.Exchange`: makes the tensors that it makes, and exchanges nothing."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self._rooms: set[int] = set()
        self._alive: list[Tensor] = []  # so that no other storage gets the number of one
        self._common: set[int] = set()

    def fence(self) -> None:
        """Nobody is waited for."""

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return room."""
        room = torch.empty(size, dtype=dtype)
        self._rooms.add(storage_key(room))
        self._alive.append(room)
        return room

    def common(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of all ranks."""
        whole = torch.empty(size, dtype=dtype)
        self._common.add(storage_key(whole))
        self._alive.append(whole)
        return whole

    def is_common(self, x: Tensor) -> bool:
        """Whether `common` made it."""
        return storage_key(x) in self._common

    def all_reduce(self, x: Tensor) -> SharedStarted:
        """Start a sum into a new tensor."""
        return SharedStarted(self._laid(x), tuple(x.shape))

    def all_reduce_in_place(self, x: Tensor) -> SharedStarted:
        """Start a sum in place."""
        return SharedStarted(self._laid(x), None)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> SharedStarted:
        """Start a sum of which a rank gets its rows."""
        return SharedStarted(self._laid(x), (sum(sizes),))

    def all_gather(self, x: Tensor) -> SharedStarted:
        """Start to gather."""
        return SharedStarted(self._laid(x), (self.size, *x.shape))

    def all_to_all(self, x: Tensor) -> SharedStarted:
        """Start to swap rows."""
        return SharedStarted(self._laid(x), tuple(x.shape))

    def _laid(self, x: Tensor) -> Tensor:
        """Return a tensor where others can read it."""
        return x if storage_key(x) in self._rooms else x.new_empty(x.shape)


class SharedStarted:
    """An exchange under way, and what it holds."""

    def __init__(self, given: Tensor, shape: tuple[int, ...] | None) -> None:
        self.held: list[Tensor] = [given]
        self._shape = shape

    def wait(self) -> Tensor:
        """Return the result, and let go of what was given."""
        (given,) = self.held
        self.held = []
        return given if self._shape is None else given.new_empty(self._shape)


def held_by(value: Any) -> list[Tensor]:
    """Return the tensors that a value of a bound graph keeps alive."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in held_by(item)]
    if isinstance(value, SharedStarted):
        return value.held
    started = getattr(value, "_started", None)  # members of a bucket that are gathered one by one
    wholes = getattr(value, "_wholes", None)
    return held_by([*(started or ()), *(whole for whole in wholes or () if whole is not None)])
