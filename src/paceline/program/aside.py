"""Modules that stand aside for a while: called, they hand on what they were given, and they have no tensors.

So the loop that calls them, the user's own, stays what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

_TENSORS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Call:
    """What a module was called with and what it returned, as leaves, and how these are arranged."""

    given: Sequence[Any]
    returned: Sequence[Any]
    arranged: pytree.TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Call:
        """Return the call."""
        returned, arranged = pytree.tree_flatten(result)
        return cls(pytree.tree_leaves((args, kwargs)), returned, arranged)


@dataclass(frozen=True)
class _New:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Passing:
    """How a module that stands aside makes its result.

    Args:
        call: of a module like it.
        after: the call of the next one, which shows what is handed on as what; None where that is not known.
    """

    def __init__(self, call: Call, after: Call | None) -> None:
        self._arranged = call.arranged
        self._leaves = [_source(leaf, call, after) for leaf in call.returned]

    @property
    def hands_on(self) -> bool:
        """Whether what goes in comes out."""
        return any(is_source for is_source, _ in self._leaves)

    def result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a module returns that is called with these arguments."""
        given = pytree.tree_leaves((args, kwargs))
        made = [_made(is_source, leaf, given) for is_source, leaf in self._leaves]
        return pytree.tree_unflatten(made, self._arranged)


def _source(leaf: Any, call: Call, after: Call | None) -> tuple[bool, Any]:
    """Return the number of the argument that a result is taken from; or else what it is."""
    if not isinstance(leaf, Tensor):
        return False, leaf
    seen = [] if after is None else [index for index, given in enumerate(after.given) if given is leaf]
    alike = [index for index, given in enumerate(call.given) if isinstance(given, Tensor) and kind(given) == kind(leaf)]
    chosen = [index for index in seen if index in alike] or alike
    return (True, chosen[0]) if chosen else (False, _New(tuple(leaf.shape), leaf.dtype, leaf.device))


def _made(is_source: bool, leaf: Any, given: Sequence[Any]) -> Any:
    if is_source:
        return given[leaf]
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, _New) else leaf


def kind(leaf: Any) -> Hashable:
    """Return what two arguments have in common that are alike."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return type(leaf), repr(leaf) if isinstance(leaf, (int, str, bool, type(None))) else ""


@contextlib.contextmanager
def standing_aside(members: Mapping[nn.Module, Passing]) -> Iterator[None]:
    """Let modules stand aside inside."""
    with contextlib.ExitStack() as stack:
        for module, passing in members.items():
            stack.enter_context(called_instead(module, lambda *args, _p=passing, **kwargs: _p.result(args, kwargs)))
            stack.enter_context(_without_tensors(module))
        yield


@contextlib.contextmanager
def called_instead(module: nn.Module, function: Any) -> Iterator[None]:
    """Have a function called instead of a module's forward pass, inside."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = function
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


@contextlib.contextmanager
def _without_tensors(module: nn.Module) -> Iterator[None]:
    held = {name: module.__dict__[name] for name in _TENSORS}
    module.__dict__.update({name: {} for name in _TENSORS})
    try:
        yield
    finally:
        module.__dict__.update(held)
