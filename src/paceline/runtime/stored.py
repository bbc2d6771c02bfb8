"""A step as JSON values and back: what is kept on disk, and what rank 0 sends to the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Graph

from paceline.placement.placements import Partial, Replicate, Shard, parse_placement
from paceline.plan import Mesh
from paceline.program.fake import fake_mode
from paceline.program.program import Input, InputRole, Output, OutputRole
from paceline.program.serialize import Codec, Json, graph_from_json, graph_to_json
from paceline.program.tensor_meta import fake_tensors
from paceline.runtime.collectives import FUNCTIONS
from paceline.runtime.step import PlacedInput, Step

_META = ("backward", "module")
_CODECS = {kind.__name__.lower(): Codec(kind, str, parse_placement) for kind in (Replicate, Partial, Shard)}


def graph_as_json(graph: Graph) -> Json:
    """Return a graph that runs as JSON values."""
    return graph_to_json(graph, FUNCTIONS, codecs=_CODECS, meta_keys=_META)


class GraphReader:
    """Reads what `graph_as_json` wrote.

    Args:
        constants: the tensors that travelled beside the graphs.
        fakes: give the graphs fake tensors, which compiling needs; otherwise only shapes are known.
    """

    def __init__(self, constants: Mapping[str, Tensor], *, fakes: bool) -> None:
        self._constants = constants
        self._values = fake_tensors(fake_mode()) if fakes else None

    def __call__(self, value: Json) -> Graph:
        """Return the graph."""
        return graph_from_json(value, FUNCTIONS, self._constants, codecs=_CODECS, values=self._values)


def placed_as_json(inputs: Iterable[PlacedInput]) -> Json:
    """Return inputs and their placements as JSON values."""
    return [
        [placed.item.role.value, placed.item.name, list(placed.shape), [str(p) for p in placed.placements]]
        for placed in inputs
    ]


def placed_from_json(data: Any) -> tuple[PlacedInput, ...]:
    """Return what `placed_as_json` wrote."""
    return tuple(
        PlacedInput(Input(InputRole(role), name), tuple(shape), tuple(map(parse_placement, placements)))
        for role, name, shape, placements in data
    )


def step_to_json(step: Step) -> dict[str, Json]:
    """Return a step as JSON values; its constants travel beside it."""
    return {
        "mesh": str(step.mesh),
        "forward": graph_as_json(step.forward),
        "backward": None if step.backward is None else graph_as_json(step.backward),
        "inputs": placed_as_json(step.inputs),
        "outputs": [[item.role.value, item.name] for item in step.outputs],
        "gradients": list(step.gradients),
        "aliases": dict(step.aliases),
        "weight": step.weight,
        "unknown_operators": list(step.unknown_operators),
    }


def step_from_json(data: Mapping[str, Json], constants: Mapping[str, Tensor], *, fakes: bool) -> Step:
    """Return the step that `step_to_json` wrote.

    Args:
        data: JSON values.
        constants: the tensors that travelled beside them.
        fakes: give the graphs fake tensors, which compiling needs; otherwise only shapes are known.
    """
    graph = GraphReader(constants, fakes=fakes)
    return Step(
        mesh=Mesh.parse(data["mesh"]),
        forward=graph(data["forward"]),
        backward=None if data["backward"] is None else graph(data["backward"]),
        inputs=placed_from_json(data["inputs"]),
        outputs=tuple(Output(OutputRole(role), name) for role, name in data["outputs"]),
        gradients=tuple(data["gradients"]),
        constants=dict(constants),
        aliases=dict(data["aliases"]),
        weight=data["weight"],
        unknown_operators=tuple(data["unknown_operators"]),
    )
