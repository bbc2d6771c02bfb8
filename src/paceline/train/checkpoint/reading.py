"""Reading tensors of a checkpoint into any layout: each piece that is wanted is put together from those it meets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.placement.boxes import Box
from paceline.train.checkpoint.manifest import Manifest
from paceline.train.checkpoint.pieces import Held
from paceline.train.checkpoint.tensorfile import TensorFiles


class Reader:
    """Tensors of one checkpoint. Use as a context manager."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        self._path = path
        self._files = TensorFiles(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Return a part of the tensor `key`, or all of it, on the CPU; reads only the files and bytes that it needs.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or a file cannot be read.
        """
        entry = self._manifest.tensors.get(key)
        if entry is None:
            raise CheckpointError(f"{self._path} has no '{key}'.")
        box = box or Box.whole(entry.spec.shape)
        for piece in entry.pieces:
            if piece.patch.whole == box:
                return self._files.read(piece.file, key, piece.patch, box)
        found = torch.empty(box.shape, dtype=entry.spec.dtype)
        for piece in entry.pieces:
            if shared := piece.patch.whole.intersect(box):
                found[shared.inside(box).index] = self._files.read(piece.file, key, piece.patch, shared)
        return found

    @torch.no_grad()
    def fill(self, targets: Iterable[Held]) -> None:
        """Overwrite the tensors of `targets` with their parts of the checkpoint."""
        for held in targets:
            for patch in held.patches:
                held.tensor[patch.local.index].copy_(self.read(held.key, patch.whole))
