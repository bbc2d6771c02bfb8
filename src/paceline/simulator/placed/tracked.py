"""Tensors without data whose lives are told to a memory: what eager code makes and lets go of is taken and freed."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.program.fake import is_fake, storage_key
from paceline.simulator.placed.memory import Held, Memory, Storage

_NUMBER = torch.ops.aten._local_scalar_dense.default


class Tracked(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """While it is entered, tensors without data that operators make are held by a memory as long as they live.

    Attributes:
        phase: what is being done, for the peak.
        held: what new tensors are for.
    """

    def __init__(self, memory: Memory, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.phase = ""
        self.held = Held.ACTIVATIONS
        self._memory = memory
        self._mode = mode
        self._sees = True
        self._storages: dict[int, Storage] = {}
        self._alive: Counter[int] = Counter()

    def new(self, like: Tensor, held: Held) -> Tensor:
        """Return a tensor in memory of its own."""
        with self._unseen():
            made = torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device)
        return self._watch(made, Storage(made.untyped_storage().nbytes(), held))

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return room for what is received."""
        with self._unseen():
            made = torch.empty(tuple(shape), dtype=dtype)
        return self._watch(made, Storage(made.untyped_storage().nbytes(), Held.EXCHANGED))

    def like(self, value: Tensor, storage: Storage) -> Tensor:
        """Return a tensor like one that lies in a storage."""
        with self._unseen():
            stride = value.stride()
            made = torch.empty_strided(tuple(value.shape), stride, dtype=value.dtype, device=value.device)
        return self._watch(made, storage)

    def storage(self, value: Tensor) -> Storage:
        """Return the storage of a tensor; of one with data, which counts nothing, an empty one."""
        if not is_fake(value):
            return Storage(0, Held.ACTIVATIONS)
        return self._storages[storage_key(value)]

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """Make tensors without data that are watched by hand."""
        self._sees = False
        try:
            with self._mode:
                yield
        finally:
            self._sees = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _NUMBER and is_fake(args[0]):
            return 1.0
        made = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(made) if self._sees else ():
            if is_fake(value):
                known = self._storages.get(storage_key(value))
                self._watch(value, known or Storage(value.untyped_storage().nbytes(), self.held))
        return made

    def _watch(self, value: Tensor, storage: Storage) -> Tensor:
        key = storage_key(value)
        self._storages[key] = storage
        self._alive[key] += 1
        self._memory.hold(storage, phase=self.phase)
        weakref.finalize(value, self._gone, key, storage)
        return value

    def _gone(self, key: int, storage: Storage) -> None:
        self._memory.drop(storage)
        self._alive[key] -= 1
        if not self._alive[key]:  # the number may be another storage's next
            del self._alive[key], self._storages[key]
