"""Steps of small modules on any mesh, for tests that look at the graphs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from paceline.placement.place import place
from paceline.plan import Mesh, Plan
from paceline.program.capture import Batch, capture
from paceline.runtime import collectives
from paceline.runtime.step import Step, schedule

WIDTH = 8
BATCH = 12


class Stack(nn.Module):
    """Blocks of equal shape, wide enough that each weight fills a bucket of a kilobyte."""

    def __init__(self, blocks: int = 4, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        ).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(BATCH, WIDTH, dtype=dtype),)


def planned(module: nn.Module, example: Batch, plan: Plan) -> Step:
    return schedule(place(capture(module, example), plan.mesh), plan)


def stack(mesh: str, **options: object) -> Step:
    return planned(Stack(), batch(), Plan(Mesh.parse(mesh)).with_(**options))


def graphs(step: Step) -> list[Graph]:
    return [step.forward] if step.backward is None else [step.forward, step.backward]


def called(graph: Graph, target: object) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target is target]


def started(graph: Graph) -> list[tuple[int, int, int, Node]]:
    """For each collective: where it starts, is waited for, and is first read; and its node."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in collectives.STARTS:
            (wait,) = node.users
            assert wait.target is collectives.wait, "a started collective has exactly one reader, its wait"
            found.append((order[node], order[wait], min(order[user] for user in wait.users), node))
    return found


def members(start: Node) -> list[Node]:
    """What a bucket was packed from, in order."""
    packed = start.args[0]
    assert isinstance(packed, Node)
    return list(packed.args[0]) if packed.target is torch.ops.aten.cat.default else [packed]  # type: ignore[arg-type]


def nbytes(node: Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def layout(step: Step) -> Iterator[str]:
    """Every call of a step, in order: equal for equal steps."""
    for graph in graphs(step):
        names: dict[Node, int] = {}
        for node in graph.nodes:
            names[node] = len(names)
            args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n, names=names: f"%{names[n]}")
            yield f"{node.op} {node.target if node.op != 'placeholder' else ''} {args}"
