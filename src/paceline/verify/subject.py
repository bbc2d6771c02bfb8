"""What is verified: a module and its batch, with the same weights and samples in every process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.program.build import Factory, batch_size, build, checked_batch
from paceline.program.capture import Batch
from paceline.verify.precision import Precision

SEED = 0


@dataclass(frozen=True)
class Subject:
    """How to make the module and its batch, and the type that they compute in."""

    factory: str | Factory
    arguments: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision = Precision.FLOAT64

    def build(self, start: Path | None = None) -> tuple[nn.Module, Batch]:
        """Return a fresh module in training mode, and the batch; both on the CPU, in the type of the precision.

        Args:
            start: a file that `save_start` wrote: take tensors from there, whatever the factory draws.

        Raises:
            RecipeError: the factory cannot be used.
        """
        module, batch = build(self.factory, self.arguments, SEED)
        batch = checked_batch(batch)
        dtype = self.precision.storage
        module = module.to("cpu", dtype).train()
        batch = pytree.tree_map_only(Tensor, lambda x: x.to("cpu", dtype if x.is_floating_point() else x.dtype), batch)
        return (module, batch) if start is None else (module, _restored(module, batch, start))


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers; tied ones once, under their first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def save_start(module: nn.Module, batch: Batch, file: Path) -> None:
    """Write the weights and samples that all runs start from."""
    tensors = {f"module/{name}": tensor for name, tensor in named_tensors(module).items()}
    tensors |= {f"batch/{i}": leaf for i, leaf in enumerate(pytree.tree_leaves(batch)) if isinstance(leaf, Tensor)}
    save_file({name: dense_copy(tensor) for name, tensor in tensors.items()}, file)


def dense_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy that shares memory with nothing."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _restored(module: nn.Module, batch: Batch, start: Path) -> Batch:
    saved = load_file(start)
    with torch.no_grad():
        for name, tensor in named_tensors(module).items():
            tensor.copy_(saved[f"module/{name}"])
    leaves, structure = pytree.tree_flatten(batch)
    restored: Batch = pytree.tree_unflatten([saved.get(f"batch/{i}", leaf) for i, leaf in enumerate(leaves)], structure)
    return restored


def batches(batch: Batch, steps: int) -> Iterator[Batch]:
    """Yield a batch per step: the given one, then its samples in other orders, so that ranks meet other samples."""
    size = batch_size(batch)
    assert size is not None
    yield batch
    for step in range(1, steps):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(step))

        def shuffled(leaf: Tensor, order: Tensor = order) -> Tensor:
            return leaf[order] if leaf.ndim and leaf.shape[0] == size else leaf

        yield pytree.tree_map_only(Tensor, shuffled, batch)
