"""The step of a pipeline as JSON values and back: what is kept on disk, and what rank 0 sends to the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from paceline.plan import Mesh
from paceline.program.program import Input, InputRole, Output, OutputRole
from paceline.program.serialize import Json
from paceline.program.stages import Part, Pipeline, Stage
from paceline.runtime.pipeline.step import Edges, PipelineStep, Reduction, Sent
from paceline.runtime.stored import GraphReader, graph_as_json, placed_as_json, placed_from_json

_PER_STAGE = ("seconds", "parameter_bytes", "saved_bytes")
_PARTS = ("forward", "backward", "backward_input", "backward_weight")


def pipeline_to_json(step: PipelineStep) -> dict[str, Json]:
    """Return a step as JSON values; its constants travel beside it."""
    return {
        "mesh": str(step.mesh),
        "stages": [_stage_as_json(stage) for stage in step.pipeline.stages],
        "forward_edges": _edges_as_json(step.pipeline.forward_edges),
        "backward_edges": _edges_as_json(step.pipeline.backward_edges),
        "names": {name: [item.role.value, item.name] for name, item in step.pipeline.inputs.items()},
        "cuts": list(step.pipeline.cuts),
        **{name: list(getattr(step.pipeline, name)) for name in _PER_STAGE},
        "reductions": [
            None if found is None else [graph_as_json(found.graph), list(found.parameters)] for found in step.reductions
        ],
        "inputs": placed_as_json(step.inputs),
        "sent": {name: [list(sent.shape), str(sent.dtype)] for name, sent in step.sent.items()},
        "draws": step.draws,
        "counts": step.counts,
        "loss_dtype": str(step.loss_dtype),
        "aliases": dict(step.aliases),
        "weight": step.weight,
        "unknown_operators": list(step.unknown_operators),
    }


def pipeline_from_json(data: Mapping[str, Json], constants: Mapping[str, Tensor], *, fakes: bool) -> PipelineStep:
    """Return the step that `pipeline_to_json` wrote; see `runtime.stored.step_from_json`."""
    graph = GraphReader(constants, fakes=fakes)
    reductions = [
        None if found is None else Reduction(graph(found[0]), tuple(found[1])) for found in data["reductions"]
    ]
    return PipelineStep(
        mesh=Mesh.parse(data["mesh"]),
        pipeline=Pipeline(
            stages=tuple(_stage_from_json(index, stage, graph) for index, stage in enumerate(data["stages"])),
            forward_edges=_edges_from_json(data["forward_edges"]),
            backward_edges=_edges_from_json(data["backward_edges"]),
            inputs={name: Input(InputRole(role), users) for name, (role, users) in data["names"].items()},
            values={},
            cuts=tuple(data["cuts"]),
            **{name: tuple(data[name]) for name in _PER_STAGE},
        ),
        reductions=tuple(reductions),
        inputs=placed_from_json(data["inputs"]),
        sent={name: Sent(tuple(shape), _dtype(dtype)) for name, (shape, dtype) in data["sent"].items()},
        draws=data["draws"],
        counts=data["counts"],
        loss_dtype=_dtype(data["loss_dtype"]),
        constants=dict(constants),
        aliases=dict(data["aliases"]),
        weight=data["weight"],
        unknown_operators=tuple(data["unknown_operators"]),
    )


def _stage_as_json(stage: Stage) -> Json:
    return {
        **{name: _part_as_json(getattr(stage, name)) for name in _PARTS},
        "outputs": [[output.role.value, output.name, value] for output, value in stage.outputs.items()],
        "gradients": dict(stage.gradients),
        "saved": list(stage.saved),
        "kept": list(stage.kept),
    }


def _stage_from_json(index: int, data: Any, graph: GraphReader) -> Stage:
    parts = {name: _part_from_json(data[name], graph) for name in _PARTS}
    assert parts["forward"] is not None
    return Stage(
        index=index,
        forward=parts["forward"],
        backward=parts["backward"],
        backward_input=parts["backward_input"],
        backward_weight=parts["backward_weight"],
        outputs={Output(OutputRole(role), name): value for role, name, value in data["outputs"]},
        gradients=dict(data["gradients"]),
        saved=tuple(data["saved"]),
        kept=tuple(data["kept"]),
    )


def _part_as_json(part: Part | None) -> Json:
    return None if part is None else [graph_as_json(part.graph), list(part.inputs), list(part.outputs)]


def _part_from_json(data: Any, graph: GraphReader) -> Part | None:
    if data is None:
        return None
    made: Graph = graph(data[0])
    return Part(made, tuple(data[1]), tuple(data[2]))


def _edges_as_json(edges: Edges) -> Json:
    return [[source, target, list(names)] for (source, target), names in edges.items()]


def _edges_from_json(data: Any) -> Edges:
    return {(source, target): tuple(names) for source, target, names in data}


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
