"""A forward pass on fake tensors, watched: which of the siblings that look alike compute the same.

Of many siblings a few compute, and the others stand aside. Where those few differ, all of them are watched.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.program.aside import Call, Passing, called_instead, kind
from paceline.program.capture import Batch, rehearse
from paceline.program.repeats import KEPT, Siblings

_FIRST, _LAST = 4, 2
"""How many siblings are watched that are called first, and last: what alternates with periods up to four is seen."""


@dataclass(frozen=True)
class Equals:
    """Siblings that compute the same.

    Attributes:
        paths: in the order in which they are called.
        passing: how those that stand aside hand on what they are given.
    """

    paths: tuple[str, ...]
    passing: Passing

    @property
    def kept(self) -> tuple[str, ...]:
        """Those that are captured."""
        return (*self.paths[: KEPT - 1], self.paths[-1])


def equals(module: nn.Module, batch: Batch, found: Sequence[Siblings], autocast: torch.dtype | None) -> list[Equals]:
    """Return the siblings that compute the same, where they are more than are kept of them."""
    sets = [_Watched(siblings) for siblings in found]
    _rehearse(module, batch, sets, autocast)
    unequal = [watched for watched in sets if len(watched.classes()) > 1]
    if unequal:
        for watched in sets:
            watched.start_again(watch_all=watched in unequal)
        _rehearse(module, batch, sets, autocast)
    return [
        Equals(tuple(paths), watched.passing)
        for watched in sets
        if watched.passing is not None and watched.passing.hands_on
        for paths in watched.classes()
        if len(paths) > KEPT
    ]


def _rehearse(module: nn.Module, batch: Batch, sets: Sequence[_Watched], autocast: torch.dtype | None) -> None:
    traces = _Traces()
    with contextlib.ExitStack() as stack:
        for watched in sets:
            for path, member in watched.members.items():
                stack.enter_context(called_instead(member, watched.calls(path, member.forward, traces)))
        rehearse(module, batch, traces, autocast)


class _Traces(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Writes down what is called, for each of the modules that are being called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._open: list[list[Hashable]] = []

    @contextlib.contextmanager
    def of_call(self) -> Iterator[list[Hashable]]:
        """Yield what is called inside, which grows."""
        trace: list[Hashable] = []
        self._open.append(trace)
        try:
            yield trace
        finally:
            self._open.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._open:
            leaves = tuple(map(_what, pytree.tree_leaves((args, kwargs or {}))))
            for trace in self._open:
                trace.append((func, leaves))
        return func(*args, **(kwargs or {}))


def _what(leaf: Any) -> Hashable:
    """Return what tells calls apart: shapes and whole numbers; rates such as that of a dropout do not."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return repr(leaf) if isinstance(leaf, (int, str, torch.dtype, torch.device)) else None


@dataclass
class _Watched:
    """Siblings, and what was seen of them."""

    siblings: Siblings
    all: bool = False
    order: list[str] = field(default_factory=list)
    traces: dict[str, list[Hashable]] = field(default_factory=dict)
    known: set[Hashable] = field(default_factory=set)
    passing: Passing | None = None
    _before: Call | None = None

    @property
    def members(self) -> dict[str, nn.Module]:
        return dict(self.siblings.members)

    def start_again(self, *, watch_all: bool) -> None:
        """Forget what was seen, but for how results are handed on."""
        self.all, self.order, self.traces, self._before = watch_all, [], {}, None

    def classes(self) -> list[list[str]]:
        """Return those that computed the same, in the order of calls; all that stood aside are like the first."""
        found: dict[Hashable, list[str]] = defaultdict(list)
        some = tuple(next(iter(self.traces.values()), ()))
        for path in self.order:
            found[tuple(self.traces.get(path, some))].append(path)
        return list(found.values())

    def calls(self, path: str, forward: Any, traces: _Traces) -> Any:
        """Return what is called instead of a member's forward pass."""

        def called(*args: Any, **kwargs: Any) -> Any:
            given = tuple(map(kind, pytree.tree_leaves((args, kwargs))))
            if path not in self.order:
                self.order.append(path)
            if not self._computes(path, given):
                assert self.passing is not None
                return self.passing.result(args, kwargs)
            with traces.of_call() as trace:
                result = forward(*args, **kwargs)
            self.known.add(given)
            self.traces.setdefault(path, []).extend([given, *trace])
            self._learn(Call.of(args, kwargs, result))
            return result

        return called

    def _computes(self, path: str, given: Hashable) -> bool:
        paths = list(self.siblings.members)
        among_last = path in (*paths[-_LAST:], paths[len(paths) // 2])
        hands_on = self.passing is not None and self.passing.hands_on
        return (
            self.all
            or len(self.traces) < _FIRST
            or path in self.traces
            or among_last
            or not (hands_on and given in self.known)
        )

    def _learn(self, call: Call) -> None:
        """Take from the first two calls how results are handed on."""
        if self._before is not None and (self.passing is None or len(self.traces) == KEPT - 1):
            self.passing = Passing(self._before, call)
        self._before = call
