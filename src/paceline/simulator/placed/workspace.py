"""Memory that an operator takes for itself while it runs, beside what it returns.

Kernels of convolutions lay their inputs out anew and accumulate apart; others work on a copy. How much that is depends
on the library, so on this machine it is measured, once for each call that differs; elsewhere nobody knows it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from paceline.placement.calls import frozen

aten = torch.ops.aten
ours = torch.ops.paceline
_TAKE_SOME = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.native_dropout.default,
    aten.native_dropout_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
_OURS = "paceline"
_MEMORY = "[memory]"


class Workspaces(Protocol):
    """Knows what operators take for themselves."""

    def bytes(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the most bytes that a call takes beside its results; its tensors have no data."""
        ...


class NoWorkspaces:
    """Takes operators for those that need nothing."""

    def bytes(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return 0."""
        return 0


class MeasuredWorkspaces:
    """Runs each call once on this machine's processor and looks at what it allocates."""

    def __init__(self) -> None:
        self._found: dict[Hashable, int] = {}

    def bytes(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return what a call took."""
        if target not in _TAKE_SOME and getattr(target, "namespace", "") != _OURS:
            return 0
        described = pytree.tree_map_only(Tensor, _described, (args, dict(kwargs)))
        key = target, frozen(described[0], []), frozen(described[1], [])
        if key not in self._found:
            self._found[key] = _measured(target, args, kwargs)
        return self._found[key]


def _described(value: Tensor) -> tuple[Any, ...]:
    return "tensor", tuple(value.shape), tuple(value.stride()), str(value.dtype)


def _measured(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the most memory that a call takes on tensors of zeros, without what it returns."""
    given, named = pytree.tree_map_only(Tensor, _real, (args, dict(kwargs)))
    try:
        target(*given, **named)  # what is made once, at the first call, is not the call's
        with _speechless(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            results = target(*given, **named)
    except (RuntimeError, NotImplementedError):  # zeros will not do for it
        return 0
    live = peak = 0
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == _MEMORY]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(results)}
    return max(0, peak - sum(storages.values()))


def _real(value: Tensor) -> Tensor:
    return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype).zero_()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def _speechless() -> Iterator[None]:
    """Let nobody hear what libraries print: the profiler announces each of its starts on the standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
