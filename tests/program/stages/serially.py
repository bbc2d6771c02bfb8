"""Interpreters of pipelines in one process: stage after stage, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter

from paceline.program.capture import batch_leaves
from paceline.program.program import InputRole, Output, OutputRole, Program, holder
from paceline.program.stages import Part, Pipeline, Stage

Values = dict[str, Any]


@dataclass
class Ran:
    """What the micro-batches of a step add up to."""

    loss: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)


class Stages:
    """Runs a pipeline. Stages share nothing but what the edges carry, and saved values nothing but `saved`."""

    def __init__(self, pipeline: Pipeline, program: Program, module: nn.Module) -> None:
        self.pipeline = pipeline
        self.constants = dict(program.constants)
        self.state: dict[str, Tensor] = {
            name: value.detach().clone() for name, value in [*module.named_parameters(), *module.named_buffers()]
        }
        self._interpreters: dict[Graph, Interpreter] = {}
        check(pipeline)

    def run(self, batches: Sequence[Any], shares: Sequence[float], *, split: bool = False) -> Ran:
        """Forward passes of all micro-batches, then backward passes in the other order: as unlike serial as can be."""
        self.leaves = [batch_leaves(batch) for batch in batches]
        self.shares = shares
        at_hand = [[Values() for _ in self.pipeline.stages] for _ in batches]
        found = Ran(torch.zeros(()))
        for number, values in enumerate(at_hand):
            for stage in self.pipeline.stages:
                self._forward(stage, values, number, found)
        for number, values in reversed(list(enumerate(at_hand))):
            for stage in reversed(self.pipeline.stages):
                if stage.backward is not None:
                    self._backward(stage, values, number, found, split)
        return found

    def _forward(self, stage: Stage, values: list[Values], number: int, found: Ran) -> None:
        here = values[stage.index]
        made = self._part(stage.forward, here, number)
        here.update(made)
        for (source, target), names in self.pipeline.forward_edges.items():
            if source == stage.index:
                values[target].update({name: self._sent(name, here[name]) for name in names})
        for output, name in stage.outputs.items():
            if output.role is OutputRole.LOSS:
                found.loss = found.loss + here[name] * self.shares[number]
            elif output.role is OutputRole.WEIGHT:
                found.weights.append(float(here[name]))
            else:
                self.state[output.name].copy_(here[name])
                found.buffers[output.name] = self.state[output.name]
        values[stage.index] = {name: here[name] for name in stage.saved}

    def _backward(self, stage: Stage, values: list[Values], number: int, found: Ran, split: bool) -> None:
        here = values[stage.index]
        if split:
            assert stage.backward_input is not None and stage.backward_weight is not None
            here.update(self._part(stage.backward_input, here, number))
        else:
            assert stage.backward is not None
            here.update(self._part(stage.backward, here, number))
        for (source, target), names in self.pipeline.backward_edges.items():
            if source == stage.index:
                values[target].update({name: self._sent(name, here[name]) for name in names})
        if split:
            here.update(self._part(stage.backward_weight, here, number))
        for parameter, name in stage.gradients.items():
            before = found.gradients.get(parameter)
            found.gradients[parameter] = here[name].clone() if before is None else before + here[name]
        values[stage.index] = {}

    def _part(self, part: Part, here: Mapping[str, Any], number: int) -> Values:
        inputs = [self._input(name, number) if name in self.pipeline.inputs else here[name] for name in part.inputs]
        if part.graph not in self._interpreters:
            self._interpreters[part.graph] = Interpreter(holder(self.constants), graph=part.graph)
        interpreter = self._interpreters[part.graph]
        with torch.no_grad():
            made = interpreter.run(*inputs, enable_io_processing=False)
        return dict(zip(part.outputs, made, strict=True))

    def _input(self, name: str, number: int) -> Any:
        item = self.pipeline.inputs[name]
        match item.role:
            case InputRole.TANGENT:
                return torch.full((), self.shares[number], dtype=self.pipeline.values[name].dtype)
            case InputRole.BATCH:
                return self.leaves[number][item.name]
        return self.state[item.name]

    def _sent(self, name: str, value: Tensor) -> Tensor:
        """What arrives: a dense tensor of the traced layout."""
        traced = self.pipeline.values[name]
        assert (value.shape, value.dtype) == (traced.shape, traced.dtype), name
        return _dense(value, traced)


def _dense(value: Tensor, traced: Tensor) -> Tensor:
    order = sorted(range(traced.ndim), key=lambda dim: -traced.stride(dim))
    return (
        value.permute(order)
        .clone(memory_format=torch.contiguous_format)
        .permute(sorted(range(traced.ndim), key=order.__getitem__))
    )


def check(pipeline: Pipeline) -> None:
    """Whether parts, edges and names of a pipeline fit together."""
    inputs = pipeline.inputs
    assert all(isinstance(value, Tensor) for value in pipeline.values.values())
    for stage in pipeline.stages:
        received = {n for (_, target), names in pipeline.forward_edges.items() if target == stage.index for n in names}
        returned = {n for (_, target), names in pipeline.backward_edges.items() if target == stage.index for n in names}
        _check_part(stage.forward, received | inputs.keys())
        made = set(stage.forward.outputs)
        for (source, target), names in pipeline.forward_edges.items():
            assert source < target and names
            assert source != stage.index or set(names) <= made
        assert set(stage.outputs.values()) <= made
        assert set(stage.saved) <= made | received and not set(stage.saved) & inputs.keys()
        if stage.backward is None:
            assert not stage.saved and not stage.gradients and not pipeline.backward_edges
            continue
        given = {*stage.saved, *returned, *inputs}
        sent = {n for (source, _), names in pipeline.backward_edges.items() if source == stage.index for n in names}
        for (source, target), names in pipeline.backward_edges.items():
            assert source > target and names
        _check_part(stage.backward, given)
        assert {*sent, *stage.gradients.values()} == set(stage.backward.outputs)
        assert set(stage.backward.inputs) >= set(stage.saved)
        if stage.backward_input is not None and stage.backward_weight is not None:
            _check_part(stage.backward_input, given)
            _check_part(stage.backward_weight, given | set(stage.kept))
            assert set(stage.backward_input.outputs) == sent | set(stage.kept)
            assert set(stage.backward_weight.outputs) == set(stage.gradients.values())
            assert set(stage.kept) <= set(stage.backward_weight.inputs)
    losses = [o for stage in pipeline.stages for o in stage.outputs if o.role is OutputRole.LOSS]
    assert losses == [o for o in pipeline.stages[-1].outputs if o.role is OutputRole.LOSS] and len(losses) == 1
    assert Output(OutputRole.WEIGHT, "loss") not in [o for s in pipeline.stages[:-1] for o in s.outputs]


def _check_part(part: Part, given: set[str]) -> None:
    part.graph.lint()
    assert tuple(n.name for n in part.graph.nodes if n.op == "placeholder") == part.inputs
    assert len(part.graph.find_nodes(op="output")[0].args[0]) == len(part.outputs) == len(set(part.outputs))
    assert set(part.inputs) <= given, set(part.inputs) - given
    for node in part.graph.nodes:
        assert node.op == "output" or "val" in node.meta, node
