"""Factories called so that nothing is allocated: a module of any size, and a batch, whose tensors have no data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from paceline.errors import RecipeError
from paceline.program.build import Factory, build
from paceline.program.factory import load_factory
from paceline.program.fake import fake_mode


def build_without_data(
    factory: str | Factory, arguments: Mapping[str, Any], seed: int, *, tell: Callable[[str], None] = lambda _: None
) -> tuple[nn.Module, Any]:
    """Call a factory as `build` does, with tensors that have shapes and no data: 405B parameters take no memory.

    A factory that reads data (a file of weights, `.item()`, `.numpy()`) cannot be called so: it is called as it is.

    Args:
        factory: see `build`.
        arguments: see `build`.
        seed: see `build`.
        tell: is told when the factory has to be called as it is, and why.

    Raises:
        RecipeError: see `build`.
    """
    # The user's file is imported as it is: what it makes at import is shared with everybody.
    make = load_factory(factory, Path.cwd()) if isinstance(factory, str) else factory
    try:
        with fake_mode(), _converting():
            return build(make, arguments, seed)
    except RecipeError as error:
        cause = error.__cause__
        if cause is None:
            raise
        first = (str(cause).strip().splitlines() or [""])[0]
        tell(
            f"the factory needs the data of its tensors ({type(cause).__name__}: {first}): it is called as it is, and "
            "the module must fit into the memory of this machine"
        )
        return build(factory, arguments, seed)


@contextlib.contextmanager
def _converting() -> Iterator[None]:
    """Let modules be converted (`.to(torch.bfloat16)`, `.half()`), which PyTorch refuses for tensors without data."""
    known: dict[tuple[int, int], tuple[Any, Tensor, Tensor]] = {}

    def converted(function: Any, tensor: Tensor) -> Tensor:
        key = id(function), id(tensor)
        if key not in known:
            with torch.no_grad():
                new = function(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            known[key] = function, tensor, new  # while these live, nothing else has their identities
        return known[key][2]

    def apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)  # type: ignore[no-untyped-call]  # untyped in torch
        tensors: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for held in tensors:
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = converted(function, tensor)
        return module

    with mock.patch.object(nn.Module, "_apply", apply):
        yield
