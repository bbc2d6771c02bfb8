"""All ranks in one process: every node of a graph is run for every rank before the next one.

This is data parallelism in one process when devices are given, and the best debugger otherwise: a breakpoint sees the
values of all ranks side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from paceline.placement.located import coordinate
from paceline.placement.pieces import take
from paceline.plan import Mesh
from paceline.program.random import is_random
from paceline.runtime import collectives
from paceline.runtime.executor import RankValues
from paceline.runtime.windows import window_of, window_sum_of

Observer = Callable[[Node, list[Any]], None]
"""Is shown every node as soon as it has run, with its value on each rank."""


class InProcessExecutor:
    """Runs all ranks of a mesh in lock-step, each on its device."""

    def __init__(self, mesh: Mesh, devices: Sequence[torch.device], observe: Observer | None = None) -> None:
        self.ranks = tuple(range(mesh.size))
        self._observe = observe
        self._mesh = mesh
        self._devices = [devices[rank % len(devices)] for rank in self.ranks]

    def prepare(self, graph: Graph, constants: dict[str, Tensor]) -> Callable[[RankValues], RankValues]:
        """Return the interpreter of one graph."""
        last_use = _last_uses(graph)
        per_rank = {name: [value.to(device) for device in self._devices] for name, value in constants.items()}

        def run(values: RankValues) -> RankValues:
            inputs = deque([list(column) for column in zip(*values, strict=True)] if values[0] else [])
            for rank_values in values:
                rank_values.clear()
            environment: dict[Node, list[Any]] = {}
            for node in graph.nodes:
                if node.op == "placeholder":
                    environment[node] = inputs.popleft()
                elif node.op == "get_attr":
                    environment[node] = per_rank[str(node.target)]
                elif node.op == "output":
                    columns = [environment[value] for value in node.args[0]]
                    return [[column[rank] for column in columns] for rank in self.ranks]
                else:
                    environment[node] = self._call(node, environment)
                if self._observe is not None:
                    self._observe(node, environment[node])
                for dead in last_use.get(node, ()):
                    del environment[dead]
            raise AssertionError("a graph ends with its output")

        return run

    def lay_out(self, piece: Tensor, axes: Sequence[str]) -> Tensor:
        """Leave it where it is: all ranks live in this process."""
        return piece

    def sum(self, values: Sequence[Tensor], axes: Sequence[str]) -> list[Tensor]:
        """Sum over the ranks along each axis in turn."""
        found = list(values)
        for axis in axes:
            found = self._reduce(found, axis)
        return found

    def gather(self, values: Sequence[Tensor], axis: str) -> list[list[Tensor]]:
        """The values of all ranks along the axis, on the device of each."""
        gathered: dict[int, list[Tensor]] = {}
        for group in self._mesh.groups(axis):
            for rank in group:
                gathered[rank] = [values[other].to(self._devices[rank]) for other in group]
        return [gathered[rank] for rank in self.ranks]

    def _call(self, node: Node, environment: dict[Node, list[Any]]) -> list[Any]:
        if node.target is coordinate:
            return [torch.tensor(self._index(rank, str(node.args[0]))) for rank in self.ranks]
        if node.target in collectives.FUNCTIONS.values():
            x, *rest = node.args
            assert isinstance(x, Node)
            return self._communicate(node.target, environment[x], rest)

        def on(rank: int) -> Any:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: environment[n][rank])
            kwargs = _on_device(kwargs, self._devices[rank])
            return node.target(*args, **kwargs)  # type: ignore[operator]  # a call's target is a function

        if is_random(node):  # the ranks share one generator here, and must draw the same numbers
            drawn = on(0)
            return [_to(drawn, device) for device in self._devices]
        return [on(rank) for rank in self.ranks]

    def _communicate(self, target: Any, values: list[Tensor], rest: list[Any]) -> list[Tensor]:
        match target.__name__:
            case "wait":
                return values
            case "all_reduce" | "all_reduce_in_place":
                return self._reduce(values, rest[0])
            case "all_reduce_max":
                return self._per_group(rest[0], values, lambda group, _: reduce(torch.maximum, group))
            case "reduce_scatter":
                summed = self._reduce(values, rest[0])
                return [summed[rank][self._index(rank, rest[0])].clone() for rank in self.ranks]
            case "all_gather":
                return self._per_group(rest[0], values, lambda group, _: torch.stack(group))
            case "all_to_all":
                return self._per_group(rest[0], values, lambda group, i: torch.stack([x[i] for x in group]))
            case "window":
                *where, axis, _ = rest
                return self._per_group(axis, values, lambda group, i: window_of(group, i, *where))
            case "window_sum":
                *where, axis, _ = rest
                return self._per_group(axis, values, lambda group, i: window_sum_of(group, i, *where))
            case "take_piece":
                placement, axis, parts = rest
                return [take(x, placement, parts, self._index(r, axis)) for r, x in enumerate(values)]
            case "take_term":
                return [x if self._index(r, rest[0]) == 0 else torch.zeros_like(x) for r, x in enumerate(values)]
        raise AssertionError(f"no such communication: {target}")

    def _index(self, rank: int, axis: str) -> int:
        return self._mesh.coordinate(rank)[axis]

    def _reduce(self, values: list[Tensor], axis: str) -> list[Tensor]:
        return self._per_group(axis, values, lambda group, _: reduce(torch.add, group))

    def _per_group(
        self, axis: str, values: list[Tensor], combine: Callable[[list[Tensor], int], Tensor]
    ) -> list[Tensor]:
        """For each rank, combine the values of its group, brought to its device; `combine` also gets its index."""
        results: dict[int, Tensor] = {}
        for group in self._mesh.groups(axis):
            for index, rank in enumerate(group):
                device = self._devices[rank]
                results[rank] = combine([values[other].to(device) for other in group], index).clone()
        return [results[rank] for rank in self.ranks]


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For each node, the values that nothing after it reads."""
    seen: set[Node] = set()
    last: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                last.setdefault(node, []).append(source)
        if node not in seen and node.op != "output":
            last.setdefault(node, []).append(node)
    return last


def _on_device(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {**kwargs, "device": device} if isinstance(kwargs.get("device"), torch.device) else kwargs


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, (list, tuple)):
        return [_to(item, device) for item in value]
    return value.to(device)
