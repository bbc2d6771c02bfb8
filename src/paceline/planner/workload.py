"""The workload of a user's own module: what search and simulation need to know of it, for any layout.

The module is captured with equal blocks once, placed on two ranks of each kind of axis, and read block by block.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import gcd
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Node

from paceline.errors import CaptureError
from paceline.placement.calls import resolve, results
from paceline.placement.costs import Costs
from paceline.placement.dimensions import Dimension, batch_size, dimensions
from paceline.placement.placements import Shard
from paceline.plan import Recompute as Policy
from paceline.planner.amounts import Amounts, merged, together
from paceline.planner.dividing import ACCELERATOR, splits
from paceline.planner.moved import messages
from paceline.planner.saved import saved
from paceline.planner.segments import Segment, segments
from paceline.planner.working import Storages
from paceline.program.capture import Batch
from paceline.program.program import InputRole, Program
from paceline.program.rematerialize import MARK, recomputed
from paceline.program.repeated import RepeatedProgram, capture_repeated
from paceline.program.work import guesses, work_of
from paceline.runtime.planning import in_modes, training_modes
from paceline.simulator.workload import (
    Along,
    Amount,
    Block,
    Message,
    Precision,
    Recompute,
    Work,
    Workload,
)

_POLICIES = {
    Recompute.NONE: Policy.NONE,
    Recompute.SELECTIVE: Policy.ATTENTION,
    Recompute.FULL: Policy.BLOCKS,
}
ADAMW_STATES = 2


def workload_of(
    module: nn.Module,
    batch: Batch,
    *,
    autocast: torch.dtype | None = None,
    costs: Costs = ACCELERATOR,
    states: int = ADAMW_STATES,
    name: str = "",
    tell: Callable[[str], None] = lambda _: None,
) -> Workload:
    """Return what a training step of `module` consists of, block by block, and how it divides.

    Args:
        module: called as `module(*batch)` or `module(**batch)`, returns a scalar loss or an object with `.loss`; may be
            without data (`program.without_data`).
        batch: an example of a batch; amounts are told for one sample of it.
        autocast: run the forward pass under autocast to this dtype.
        costs: by which the solver chooses how tensors are split; those of the machine that the step will run on.
        states: how many numbers the optimizer keeps for each element of a parameter.
        name: of the model; that of its class by default.
        tell: is told what is being done, in a few words.

    Raises:
        CaptureError: the module cannot be captured, or is not in training; the message says what to do.
    """
    with in_modes(module, training_modes(module)):
        repeated = capture_repeated(module, _even(batch), autocast=autocast, tell=tell)
    return workload_of_program(repeated, costs=costs, states=states, name=name or type(module).__name__, tell=tell)


def workload_of_program(
    repeated: RepeatedProgram,
    *,
    costs: Costs = ACCELERATOR,
    states: int = ADAMW_STATES,
    name: str = "",
    tell: Callable[[str], None] = lambda _: None,
) -> Workload:
    """Return the workload of a captured step; see `workload_of`.

    Raises:
        CaptureError: the program has no backward pass.
    """
    program = repeated.program
    if not program.training:
        raise CaptureError("a workload is that of a training step, and the program has no backward pass.")
    for operator in guesses([program.graph]):
        tell(f"what {operator} computes is not known: it is taken for products with square matrices")
    amounts = Amounts(splits(program, costs, tell), batch_size(program))
    tell("reading what it came to")
    reader = _Reader(repeated, amounts)
    parts = segments(repeated)
    return Workload(
        name=name,
        blocks=tuple(
            reader.block(segment, before, after)
            for before, segment, after in zip([None, *parts], parts, [*parts[1:], None], strict=False)
        ),
        tokens=_tokens(program),
        precision=_precision(program, states),
        divisors=reader.divisors(parts),
    )


class _Reader:
    """Reads segments of a program as blocks."""

    def __init__(self, repeated: RepeatedProgram, amounts: Amounts) -> None:
        program = repeated.program
        self._program = program
        self._amounts = amounts
        self._nodes = {node.name: node for node in program.graph.nodes}
        self._kept = {ours: list(saved(recomputed(program, theirs))) for ours, theirs in _POLICIES.items()}
        again = recomputed(program, Policy.ATTENTION).graph
        self._again = {node.name for node in again.nodes if node.meta.get(MARK) and not node.meta.get("backward")}
        self._again -= {node.name for node in program.graph.nodes if node.meta.get(MARK)}
        self._messages = self._read_messages()
        self._storages = Storages(program.copy())

    def block(self, segment: Segment, before: Segment | None, after: Segment | None) -> Block:
        """Return a segment as a block; what only the outer ones of blocks exchange is told of their neighbours."""
        names = {node.name: times for node, times in segment.nodes.items()}
        return Block(
            name=segment.name,
            count=segment.count,
            work=tuple(merged(self._work(segment))),
            messages=(
                *self._exchanged(segment.nodes),
                *(self._unlike(before, before.last) if before is not None else ()),
                *(self._unlike(after, after.first) if after is not None else ()),
            ),
            parameters=together(self._elements(node, times) for node, times in segment.parameters.items()),
            kept={
                policy: together(
                    self._amounts.of(
                        item.nbytes * names[item.node],
                        self._amounts.kept(self._nodes[item.node], item.index, item.nbytes),
                    )
                    for item in kept
                    if item.node in names
                )
                for policy, kept in self._kept.items()
            },
            output=self._output(segment),
            workspace=self._workspace(segment),
            shared=together(self._elements(node, 1) for node in segment.shared),
        )

    def divisors(self, parts: Iterable[Segment]) -> dict[Along, int]:
        """Return sizes that an axis must divide: of what is split, in blocks that repeat where there are any."""
        found = _input_sizes(self._program)
        blocks = [segment for segment in parts if segment.count > 1] or list(parts)
        names = {node.name for segment in blocks for node in (*segment.nodes, *segment.parameters)}
        split = self._amounts.splits.get(Along.TP)
        sizes = [] if split is None else list(_split_sizes(split.placements, self._nodes, names))
        return {**found, **({Along.TP: gcd(*sizes)} if sizes else {})}

    def _work(self, segment: Segment) -> Iterable[Work]:
        for node, times in segment.nodes.items():
            for work in self._amounts.work(node, times):
                yield work if node.name not in self._again else _again(work)

    def _elements(self, node: Node, times: int) -> Amount:
        along = self._amounts.tensor(node) & {Along.TP}
        return Amount(float(node.meta["val"].numel() * times), along)

    def _output(self, segment: Segment) -> Amount:
        """Return what the calls after a segment read of it in the forward pass, the largest such tensor's way."""
        found: dict[Node, Node] = {}
        for node in segment.nodes:
            if not node.meta.get("backward") and not isinstance(node.meta.get("val"), (list, tuple)):
                readers = [user for user in node.users if user.op == "call_function" and not user.meta.get("backward")]
                if any(user not in segment.nodes for user in readers):
                    found[_root(node)] = node
        pieces = together(
            self._amounts.of(node.meta["val"].nbytes, self._amounts.tensor(resolve(node).node, resolve(node).index))
            for node in found
            if node.op == "call_function"
        )
        return max(pieces, key=lambda piece: float(piece.value), default=Amount(0.0))

    def _workspace(self, segment: Segment) -> Amount:
        """Return what is needed for a while, which divides as the largest part of it does."""
        kept = [item.node for item in self._kept[Recompute.NONE]]
        found = self._storages.working(segment.nodes, [name for name in kept if self._nodes[name] in segment.nodes])
        if found.largest is None:
            return Amount(0.0)
        return self._amounts.of(found.nbytes, self._amounts.tensor(self._nodes[found.largest]))

    def _exchanged(self, nodes: Mapping[Node, int]) -> list[Message]:
        return [message for node, times in nodes.items() for message in self._messages[node.name] * times]

    def _unlike(self, segment: Segment, outer: Iterable[Node]) -> list[Message]:
        """Return what an outer block exchanges and the typical one does not."""
        found = self._exchanged(dict.fromkeys(outer, 1))
        for message in self._exchanged(segment.nodes):
            if message in found:
                found.remove(message)
        return found

    def _read_messages(self) -> Mapping[str, list[Message]]:
        """Return messages by the captured node for whose call they are made."""
        found: dict[str, list[Message]] = defaultdict(list)
        for along in (Along.TP, Along.SP, Along.HW):
            split = self._amounts.splits.get(along)
            if split is not None:
                for name, message in messages(split, self._amounts, self._nodes):
                    found[name].append(message)
        return found


def _again(work: Work) -> Work:
    return Work(work.kind, work.when, work.dims, work.times, work.factor, work.nbytes, True, work.launches)


def _root(node: Node) -> Node:
    """Return what a view is a view of."""
    while work_of(node).view and node.op == "call_function" and len(node.all_input_nodes) == 1:
        source = node.all_input_nodes[0]
        if isinstance(source.meta.get("val"), (list, tuple)):
            break
        node = source
    return node


def _split_sizes(
    placements: Mapping[tuple[str, int], Any], nodes: Mapping[str, Node], names: set[str]
) -> Iterable[int]:
    """Yield the sizes of dimensions that are split, of each block of them."""
    for (name, index), placement in placements.items():
        if name in names and isinstance(placement, Shard) and isinstance(placement.blocks, int):
            whole = results(nodes[name])[index]
            if whole is not None:
                yield int(whole.shape[placement.dim]) // placement.blocks


def _input_sizes(program: Program) -> dict[Along, int]:
    """Return the sizes of time and height of the batch."""
    found: dict[Along, int] = {}
    nodes = dict(zip(program.inputs, program.placeholders, strict=True))
    for item, meaning in dimensions(program).items():
        for size, what in zip(nodes[item].meta["val"].shape, meaning, strict=True):
            if what is Dimension.TIME:
                found.setdefault(Along.SP, int(size))
            elif what is Dimension.HEIGHT:
                found.setdefault(Along.HW, int(size))
    if Along.SP not in found and Along.HW in found:  # patches of an image are a sequence along its height
        found[Along.SP] = found[Along.HW]
    return found


def _tokens(program: Program) -> int:
    """Return how many tokens a sample has; 1 where it has none."""
    nodes = dict(zip(program.inputs, program.placeholders, strict=True))
    for item, meaning in dimensions(program).items():
        value = nodes[item].meta["val"]
        if item.role is InputRole.BATCH and not value.is_floating_point() and Dimension.TIME in meaning:
            return int(value.shape[meaning.index(Dimension.TIME)])
    return 1


def _precision(program: Program, states: int) -> Precision:
    """Return the type of most products, and the bytes of most parameters."""
    products: Counter[str] = Counter()
    for node in program.graph.nodes:
        flops = work_of(node).flops
        if flops:
            products[str(next(value.dtype for value in results(node) if value is not None))] += int(flops)
    sizes: Counter[int] = Counter()
    for item, node in zip(program.inputs, program.placeholders, strict=True):
        if item.role is InputRole.PARAMETER:
            sizes[node.meta["val"].element_size()] += node.meta["val"].numel()
    size = sizes.most_common(1)[0][0] if sizes else 4
    dtype = products.most_common(1)[0][0] if products else "torch.float32"
    return Precision(dtype.removeprefix("torch."), size, size, states * size)


def _even(batch: Batch) -> Batch:
    """Return a batch of an even number of samples, which two ranks can share: twice the same where it is odd."""
    first = next((leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    if first is None or first.shape[0] % 2 == 0:
        return batch
    size = first.shape[0]

    def doubled(leaf: Tensor) -> Tensor:
        return torch.cat([leaf, leaf]) if leaf.ndim and leaf.shape[0] == size else leaf

    twice: Batch = pytree.tree_map_only(Tensor, doubled, batch)
    return twice
