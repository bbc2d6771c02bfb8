"""When the storages of a graph are made and given back: read off by running it, as a rank runs it, without data.

The graph is bound as the runtime binds it and its values are freed after their last use, so what a bucket, a gathered
parameter or a started collective holds is what it holds in a run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node

from paceline.plan import Mesh
from paceline.program.fake import fake_mode, storage_key, with_data
from paceline.runtime.binding import Bound, bind
from paceline.simulator.placed.carriers import Carrier, SharedGroup, groups_of, held_by
from paceline.simulator.placed.started import operator_name
from paceline.simulator.placed.workspace import NoWorkspaces, Workspaces


@dataclass(frozen=True)
class Birth:
    """A storage that a graph makes.

    Attributes:
        number: in the graph.
        exchanged: it is a bucket, or what a collective brings.
        output: the first output that lies in it; None where none does.
    """

    number: int
    bytes: int
    exchanged: bool
    output: int | None


@dataclass(frozen=True)
class Moment:
    """What a call makes and, once it is through, frees."""

    module: str
    operator: str
    made: tuple[int, ...]
    freed: tuple[int, ...]


@dataclass(frozen=True)
class Lifetimes:
    """The storages of a graph, by number.

    Attributes:
        given: of each placeholder, in order.
        births: what the graph makes.
        moments: of each call that makes or frees something, in order.
        outputs: of each output, in order.
    """

    given: tuple[int, ...]
    births: tuple[Birth, ...]
    moments: tuple[Moment, ...]
    outputs: tuple[int, ...]


def lifetimes(
    graph: Graph,
    constants: Mapping[str, Tensor],
    mesh: Mesh,
    carrier: Carrier,
    *,
    shared: Mapping[int, str] | None = None,
    workspaces: Workspaces | None = None,
    compile: bool = False,
) -> Lifetimes:
    """Return the lifetimes of the storages of a lowered graph.

    Args:
        graph: one pass of a placed program, after `runtime.passes.communicate`.
        constants: tensors that its `get_attr` nodes read.
        mesh: whose axes its collectives use.
        carrier: of its collectives.
        shared: placeholders, by place, that are pieces of one tensor of all ranks along an axis.
        workspaces: what operators take for themselves; by default nothing.
        compile: it is bound as graphs that are compiled are.
    """
    mode = fake_mode()
    groups = groups_of(mesh, carrier)
    with mode:
        bound = bind(graph, dict(constants), dict(groups), functional=compile or carrier is Carrier.FUNCTIONAL)
        given = [_given(node, place, shared or {}, groups) for place, node in enumerate(_placeholders(graph))]
        return _Run(bound, NoWorkspaces() if workspaces is None else workspaces).of(given)


def recorded_lifetimes(graph: Graph) -> Lifetimes:
    """Return the lifetimes of the storages of a graph that was recorded: those of the tensors it was recorded on."""
    return _Recorded(Bound(nn.Module(), graph), NoWorkspaces()).of([node.meta["val"] for node in _placeholders(graph)])


def _placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _given(node: Node, place: int, shared: Mapping[int, str], groups: Mapping[str, Any]) -> Tensor:
    """Return a tensor without data like the one that a placeholder stands for."""
    value = node.meta["val"]
    shape = tuple(value.shape)
    group = groups.get(shared.get(place, ""))
    if isinstance(group, SharedGroup) and group.exchange is not None:
        exchange = group.exchange
        whole = exchange.common(exchange.size * value.numel(), value.dtype).view(exchange.size, -1)
        return whole[exchange.rank].view(shape)
    stride = value.stride() if callable(value.stride) else value.strides
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


class _Run(Interpreter):
    """Runs a graph on tensors without data, and notes which storages each value holds."""

    def __init__(self, bound: Bound, workspaces: Workspaces) -> None:
        super().__init__(bound.root, garbage_collect_values=False, graph=bound.graph)
        self._nodes: list[Node] = list(bound.graph.nodes)
        self._workspaces = workspaces
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no other storage gets the number of one
        self._bytes: list[int] = []
        self._exchanged: list[bool] = []
        self._moments: list[tuple[str, str, list[int], list[int]]] = []
        self._holders: Counter[int] = Counter()
        self._module = ""

    def of(self, given: Sequence[Tensor]) -> Lifetimes:
        last_read = _last_reads(self._nodes)
        self.args_iter = iter(given)
        numbers = tuple(self._number(value, exchanged=False) for value in given)
        held: dict[Node, list[int]] = {}
        outputs: tuple[int, ...] = ()
        for node in self._nodes:
            if node.op == "output":
                listed = node.args[0]
                assert isinstance(listed, (list, tuple))
                values = [self.env[value] for value in listed if isinstance(value, Node)]
                outputs = tuple(self._number(value, exchanged=False) for value in values)
                break
            known = len(self._bytes)
            value = self.env[node] = self.run_node(node)
            held[node] = [self._number(tensor, exchanged=_exchanges(node)) for tensor in held_by(value)]
            if node.op == "get_attr":
                held[node] = []
            self._module = str(node.meta.get("module") or self._module)
            made = [n for n in held[node] if n >= known and node.op not in ("placeholder", "get_attr")]
            self._holders.update(held[node])
            extra = self._workspace(node)
            self._moments.append((self._module, _name(node), sorted({*made, *extra}), extra))
            for dead in last_read[node]:
                self._free(held.pop(dead), dead)
        births = {n for _, _, made, _ in self._moments for n in made}
        first = {number: place for place, number in reversed(list(enumerate(outputs)))}
        return Lifetimes(
            numbers,
            tuple(Birth(n, self._bytes[n], self._exchanged[n], first.get(n)) for n in sorted(births)),
            tuple(Moment(m, o, tuple(made), tuple(freed)) for m, o, made, freed in self._moments if made or freed),
            outputs,
        )

    def _workspace(self, node: Node) -> list[int]:
        """Return what an operator takes for itself, which it frees at once."""
        if node.op != "call_function":
            return []
        with with_data():
            nbytes = self._workspaces.bytes(node.target, *self.fetch_args_kwargs_from_env(node))
        if not nbytes:
            return []
        self._bytes.append(nbytes)
        self._exchanged.append(False)
        return [len(self._bytes) - 1]

    def _free(self, numbers: list[int], node: Node) -> None:
        """Let a value go: what nobody else holds is freed."""
        del self.env[node]
        for number in numbers:
            self._holders[number] -= 1
            if not self._holders[number]:
                self._moments[-1][3].append(number)

    def _number(self, value: Tensor, *, exchanged: bool) -> int:
        key = storage_key(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._bytes)
            self._alive.append(value)
            self._bytes.append(value.untyped_storage().nbytes())
            self._exchanged.append(exchanged)
        return self._numbers[key]


class _Recorded(_Run):
    """Takes the values that a graph was recorded with."""

    def run_node(self, node: Node) -> Any:
        """Return what it was."""
        return node.meta["val"]

    def _workspace(self, node: Node) -> list[int]:
        return []


def _last_reads(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the nodes whose values nobody reads after each node."""
    order = {node: place for place, node in enumerate(nodes)}
    found: dict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.op != "output":
            found[max([node, *node.users], key=order.__getitem__)].append(node)
    return found


def _exchanges(node: Node) -> bool:
    """Whether a node of a bound graph makes what ranks exchange."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if getattr(node.target, "namespace", "") == "_c10d_functional":
        return True
    readers = list(node.users)
    is_bucket = node.target is torch.ops.aten.cat.default and bool(readers)
    return is_bucket and all(getattr(user.target, "namespace", "") == "_c10d_functional" for user in readers)


def _name(node: Node) -> str:
    return (
        operator_name(node) if node.op == "call_function" else str(node.target).rpartition("_")[0] or str(node.target)
    )
