"""What a family is: a module with a batch of the kind that it is trained on, small enough to verify on many meshes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Any]]

BATCH = 4
TIME = 16
WORDS = 64
SIDE = 32
LABELS = 8


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: by which `--set models=` chooses it.
        title: the class that is trained, for a table.
        factory: makes a module and its batch; random weights of a small size, so that 2 and 4 divide what can be split.
        has_time: its batch has a time axis, so that `sp` has something to split.
        has_images: its batch has images: `hw` splits their height or width, `sp` their height.
    """

    name: str
    title: str
    factory: Callable[[], Built]
    has_time: bool = False
    has_images: bool = False

    @property
    def factory_name(self) -> str:
        """What `paceline verify --model` takes."""
        return f"{self.factory.__module__}:{self.factory.__qualname__}"


def tokens(words: int = WORDS, time: int = TIME) -> Tensor:
    """Return random token ids: [BATCH, time]. The first few are left out: they are the special tokens."""
    return torch.randint(4, words, (BATCH, time))


def images(side: int = SIDE) -> Tensor:
    """Return random images: [BATCH, 3, side, side]."""
    return torch.randn(BATCH, 3, side, side)


def classes() -> Tensor:
    """Return a random class for each sample: [BATCH]."""
    return torch.randint(LABELS, (BATCH,))
