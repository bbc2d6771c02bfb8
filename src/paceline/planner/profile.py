"""The profile of a module: its layers, and what each costs, for `planner.partition`.

Layers begin where a stage may begin and a module does, so that a recipe can name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch.fx import Node

from paceline.placement.calls import call_of
from paceline.placement.costs import Costs
from paceline.placement.placements import REPLICATE
from paceline.placement.redistribute import Collective
from paceline.planner.partition import Layer
from paceline.program.program import Output, OutputRole, Program
from paceline.program.stages.boundaries import module_starts
from paceline.program.stages.choose import crossing_of, weigh
from paceline.program.stages.groups import Group, groups, groups_of
from paceline.program.stages.kinds import bytes_of, is_call, is_cheap, is_item
from paceline.program.stages.prepare import prepare
from paceline.program.stages.reading import Reading
from paceline.program.stages.seconds import seconds_of as rough_seconds


def profile(program: Program, costs: Costs) -> list[Layer]:
    """Return the layers of a program, captured or placed, for one micro-batch.

    Args:
        program: stays as it is.
        costs: of this machine.
    """
    copy, copies = prepare(program, split_masks=False)
    reading = Reading(copy)
    found = groups(reading, copies)
    starts = {0: _first_module(found), **module_starts(found)}
    layer_of = [number - 1 for number in accumulate(group in starts for group in range(len(found)))]
    weights = weigh(reading, found, seconds_with(costs))
    crossing = [*crossing_of(reading, found, bytes_of), 0.0]
    ends = [*list(starts)[1:], len(found)]
    parameters, shared = _parameters(reading, found, layer_of)
    changing = _changing(reading, found, layer_of, copies)
    return [
        Layer(
            name=name,
            seconds=sum(weights.seconds[start:end]),
            activation_bytes=crossing[end],
            parameter_bytes=parameters.get(number, 0),
            shared=frozenset(shared.get(number, ())),
            may_repeat=number not in changing,
        )
        for number, ((start, name), end) in enumerate(zip(starts.items(), ends, strict=True))
    ]


def seconds_with(costs: Costs) -> Callable[[Node], float]:
    """Return what says how long a call takes on a machine."""

    def seconds(node: Node) -> float:
        if not is_call(node) or is_cheap(node) or is_item(node):
            return 0.0
        if not isinstance(node.target, torch._ops.OpOverload):
            return rough_seconds(node)
        call = call_of(node)
        return costs.operator(call, (REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.outputs), 1)

    return seconds


def bandwidth_of(costs: Costs) -> float:
    """Return bytes per second between two ranks, as measured where it was."""
    for parts, links in sorted(costs.machine.links.items()):
        if parts > 1:
            return (parts - 1) / parts / links[Collective.ALL_GATHER].per_byte
    return 1 / costs.per_byte_sent


def _first_module(found: Sequence[Group]) -> str:
    """Return the name of the first layer, which no boundary needs: the outermost module that is called."""
    paths = (str(node.meta.get("module") or "") for group in found[:1] for node in group.nodes)
    return next((path.partition(".")[0] for path in paths if path), "")


def _parameters(
    reading: Reading, found: list[Group], layer_of: list[int]
) -> tuple[dict[int, int], dict[int, list[str]]]:
    """Return by layer the bytes of the parameters that it is first to read, and the names of those it shares."""
    group_of = groups_of(found)
    nodes = {item.name: node for node, item in reading.input_of.items()}
    held: dict[int, int] = {}
    shared: dict[int, list[str]] = {}
    for name, readers in reading.readers.items():
        layers = sorted({layer_of[group_of[reader]] for reader in readers})
        held[layers[0]] = held.get(layers[0], 0) + bytes_of(nodes[name])
        for layer in layers if len(layers) > 1 else ():
            shared.setdefault(layer, []).append(name)
    return held, shared


def _changing(reading: Reading, found: list[Group], layer_of: list[int], copies: Mapping[str, Node]) -> set[int]:
    """Return the layers that read a buffer which the program changes, or change it."""
    group_of = groups_of(found)
    results = [reading.result_of[Output(OutputRole.BUFFER, name)] for name in copies]
    return {layer_of[group_of[node]] for node in (*copies.values(), *results) if node in group_of}
