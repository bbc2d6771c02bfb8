"""The nouns of a cut program: parts, stages and what passes between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Graph

from paceline.program.program import Input, Output


@dataclass(frozen=True)
class Part:
    """A graph of one stage.

    Attributes:
        graph: placeholders stand in the order of `inputs`, the output node's values in the order of `outputs`.
        inputs: names of values of the joint graph: inputs of the program, what the stage received, and what its earlier
            parts made.
        outputs: names of values of the joint graph. A value that a part hands on may be one of its inputs.
    """

    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """One stage: graphs that run once for each micro-batch.

    Parameters, buffers and leaves of the batch are inputs of every part that reads them, and are never saved.

    Attributes:
        index: its place in the pipeline.
        forward: makes what is sent forwards, `outputs`, and of `saved` what was not received.
        backward: reads saved and received values and the tangent; makes `gradients` and what is sent backwards. None in
            evaluation.
        backward_input, backward_weight: the same in two halves, where asked for. The first makes what is sent
            backwards and `kept`; the second makes `gradients`.
        outputs: loss, weight and changed buffers that this stage makes, and the name of each value.
        gradients: for each parameter, the value that is this stage's part of its gradient. A parameter that several
            stages read has a part on each.
        saved: values, own or received, that the backward parts read and that are no inputs of the program.
        kept: values that `backward_input` leaves for `backward_weight`.
    """

    index: int
    forward: Part
    backward: Part | None
    backward_input: Part | None
    backward_weight: Part | None
    outputs: dict[Output, str]
    gradients: dict[str, str]
    saved: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Pipeline:
    """A program cut into stages.

    Attributes:
        stages: in the order of the forward pass.
        forward_edges: for a pair of stages (source, target), names of the values sent, in order. Values may skip
            stages.
        backward_edges: the same for gradients and, rarely, values that an earlier stage's backward pass needs.
        inputs: what the placeholders of the joint graph are, by name.
        values: the fake tensor of every name above.
        cuts: names of the nodes at which stages 1.. begin.
        seconds: modelled seconds of the forward and backward pass of each stage, which the cut was chosen by.
        parameter_bytes: bytes of the parameters that each stage reads.
        saved_bytes: bytes that each stage keeps for the backward pass of one micro-batch.
    """

    stages: tuple[Stage, ...]
    forward_edges: dict[tuple[int, int], tuple[str, ...]]
    backward_edges: dict[tuple[int, int], tuple[str, ...]]
    inputs: dict[str, Input]
    values: dict[str, Any]
    cuts: tuple[str, ...]
    seconds: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
