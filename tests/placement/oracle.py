"""The oracle: an operator on the pieces that a strategy gives, against the operator itself, in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from paceline.placement.evaluation import Evaluator
from paceline.placement.pieces import join, take
from paceline.placement.placements import MAXIMUM, REPLICATE, Partial, Placement, Shape, Shard, divides
from paceline.placement.rules import AxisRule, Call, Rule, Strategy, Written, rule_of
from paceline.placement.rules.rule import Input
from paceline.placement.strategies import implied, seeds, strategies
from paceline.placement.writer import Writer
from paceline.plan import Mesh
from paceline.runtime.inprocess import InProcessExecutor
from paceline.runtime.passes.communicate import communicate

aten = torch.ops.aten
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Instance:
    """A call with the tensors it was made on."""

    call: Call
    tensors: tuple[Tensor, ...]
    results: tuple[Any, ...]

    @property
    def draws(self) -> bool:
        """Whether the results are random or undefined."""
        name = str(self.call.target)
        seeded = torch.Tag.nondeterministic_seeded in self.call.target.tags
        return (seeded and "attention" not in name) or "empty" in name

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """What errors of each result are measured by: sums that cancel are compared on the scale of their terms."""
        terms = 1e-3 * _largest(self.tensors)
        return tuple(max(_largest([r]), terms, 1e-12) if isinstance(r, Tensor) else 1.0 for r in self.results)


def instance(target: Any, *args: Any, **kwargs: Any) -> Instance:
    """Run an operator once, and describe the call as rules see it."""
    tensors: list[Tensor] = []

    def mark(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Input(len(tensors) - 1)
        return [mark(item) for item in value] if isinstance(value, (list, tuple)) else value

    arguments = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args) or argument.name in kwargs:
            arguments[argument.name] = mark(args[position] if position < len(args) else kwargs[argument.name])
        elif argument.has_default_value():
            arguments[argument.name] = argument.default_value
    results = _run(target, arguments, tensors)
    call = Call(
        target,
        arguments,
        tuple(tuple(t.shape) for t in tensors),
        tuple(t.dtype for t in tensors),
        tuple(tuple(r.shape) if isinstance(r, Tensor) else None for r in results),
        tuple(r.dtype if isinstance(r, Tensor) else None for r in results),
    )
    return Instance(call, tuple(tensors), results)


def _run(target: Any, arguments: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """Call an operator by its schema; views become reshapes, because pieces have other strides than the whole."""

    def fill(value: Any) -> Any:
        if isinstance(value, Input):
            return tensors[value.index]
        return [fill(item) for item in value] if isinstance(value, list) else value

    args, kwargs = [], {}
    for argument in target._schema.arguments:
        if argument.kwarg_only:
            if argument.name in arguments:
                kwargs[argument.name] = fill(arguments[argument.name])
        elif argument.name in arguments:
            args.append(fill(arguments[argument.name]))
    if target in (aten.view.default, aten._unsafe_view.default):
        target = aten.reshape.default
    result = target(*args, **kwargs)
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def _run_written(
    instance: Instance, written: Written, strategy: Strategy, given: list[list[Tensor]], parts: int
) -> list[tuple[Any, ...]]:
    """Run what a rule writes for a strategy on all ranks; return the results of each."""
    graph, evaluator = Graph(), Evaluator()
    inputs = []
    for number, piece in enumerate(given):
        inputs.append(graph.placeholder(f"x{number}"))
        inputs[-1].meta["val"] = evaluator.piece(piece[0], REPLICATE, parts)

    def fill(value: Any) -> Any:
        if isinstance(value, Input):
            return inputs[value.index]
        return [fill(item) for item in value] if isinstance(value, list) else value

    writer = Writer(graph, evaluator, "tp", parts, {"backward": False, "module": "", "rematerialize": False})
    made = written.write(writer, {name: fill(value) for name, value in instance.call.arguments.items()}, strategy)
    graph.output(tuple(node for node in made if node is not None))
    communicate(graph, 0)
    executor = InProcessExecutor(Mesh((("tp", parts),)), [torch.device("cpu")])
    results = executor.prepare(graph, {})([[piece[rank] for piece in given] for rank in range(parts)])
    found = []
    for values in results:
        left = iter(values)
        found.append(tuple(None if node is None else next(left) for node in made))
    return found


def splits(shape: Shape | None, parts: int, most: int = 64) -> list[Shard]:
    """Every split of a tensor, in every number of blocks."""
    return [
        shard
        for dim, size in enumerate(shape or ())
        for blocks in range(1, min(size, most) + 1)
        if divides(shape, shard := Shard(dim, blocks), parts)
    ]


def strategies_of(call: Call, rule: Rule, parts: int) -> list[Strategy]:
    """Every strategy of a call: with all splits allowed, there is none that a solver may see and this does not."""
    shards = [splits(shape, parts) for shape in (*call.inputs, *call.outputs)]
    found = strategies(call, rule, shards, parts)
    for slot, shard in seeds(call, rule, parts):
        assert shard in shards[slot]
    for strategy in found:  # what `implied` passes on must be what strategies do
        placements = strategy.inputs + strategy.outputs
        for slot, placement in enumerate(placements):
            if isinstance(placement, Shard) and strategy.label != "shape only":
                others = implied(call, rule, slot, placement, parts)
                assert all(placements[other] == split for other, split in others)
    return found


def pieces(tensor: Tensor, placement: Placement, parts: int) -> list[Tensor]:
    """What each rank holds; the terms of a partial sum are random."""
    if placement == MAXIMUM:
        return [torch.where(torch.rand_like(tensor) < 0.5, tensor, tensor - 1), *[tensor] * (parts - 1)]
    if not isinstance(placement, Partial):
        return [take(tensor, placement, parts, rank) for rank in range(parts)]
    scale = max(_largest([tensor]), 1e-3)
    if tensor.is_floating_point() or tensor.is_complex():
        terms = [torch.randn_like(tensor) * scale for _ in range(parts - 1)]
    else:
        terms = [torch.randint_like(tensor, -5, 5) for _ in range(parts - 1)]
    return [*terms, tensor - sum(terms)]


def faults(instance: Instance, parts: int, rule: Rule | None = None) -> Iterator[str]:
    """Yield a line for every strategy that does not give the operator's own results."""
    call = instance.call
    rule = rule_of(call) if rule is None else rule
    for strategy in strategies_of(call, rule, parts):
        fault = _fault(instance, rule, strategy, parts)
        if fault:
            inputs, outputs = ([str(p) for p in side] for side in (strategy.inputs, strategy.outputs))
            yield f"{call.target}{call.inputs} on {parts}: {inputs} -> {outputs} ({strategy.label}): {fault}"


def _fault(instance: Instance, rule: Rule, strategy: Strategy, parts: int) -> str | None:
    call = instance.call
    if instance.draws:
        splits_values = any(isinstance(p, Shard) for p in strategy.outputs) and "empty" not in str(call.target)
        return "a random result is split" if splits_values else None
    given = [pieces(t, p, parts) for t, p in zip(instance.tensors, strategy.inputs, strict=True)]
    written = rule.written.get(strategy.label) if isinstance(rule, AxisRule) else None
    arguments = dict(call.arguments) | rule.localize(dict(call.arguments), strategy, parts)
    try:
        if written is not None:
            local = _run_written(instance, written, strategy, given, parts)
        else:
            local = [_run(call.target, arguments, [piece[rank] for piece in given]) for rank in range(parts)]
    except (RuntimeError, IndexError) as error:
        return f"the operator refused: {error}"
    for index, (want, placement) in enumerate(zip(instance.results, strategy.outputs, strict=True)):
        if not isinstance(want, Tensor):
            continue
        got = join([results[index] for results in local], placement)
        if got.shape != want.shape:
            return f"output {index} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
        if not torch.allclose(got, want, rtol=0.0, atol=TOLERANCE * instance.scales[index], equal_nan=True):
            return f"output {index} is wrong"
    return None


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude of the floating-point numbers, leaving out those that stand for infinity in masks."""
    values = [t.abs()[t.abs() < 1e30] for t in tensors if t.is_floating_point() or t.is_complex()]
    return max((float(v.max()) for v in values if v.numel()), default=1.0)
