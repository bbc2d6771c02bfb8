"""An explanation for people: tables of at most a hundred columns, with repeated blocks told once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from paceline.placement.placements import Shard
from paceline.plan import Axis
from paceline.planner import words
from paceline.planner.explanation import Activation, Explanation, Held, Transfer, What
from paceline.planner.folding import fold
from paceline.planner.printing import print_table, say, section

_SMALL = 0.01
"""Part of all that is kept for the backward pass below which a tensor is not told by itself."""
_MEMORY = ("", "bytes", " ")
_TOTALS = ("axis", "pass", "kind", "tensors", "collectives", "bytes")
_SOLVER = ("axis", "modelled cost", "proven bound", "classes", "variables", "took")
_UNKNOWN = ("module", "operator", "calls")
_TRANSFERS = ("what", "pass", "kind", "from", "to", "bytes")
Row = tuple[str, ...]


def summary(told: Explanation, console: Console) -> None:
    """Print what a rank holds, what moves by axis, how it was found, and what is not split."""
    mesh = told.plan.mesh
    say(console, f"mesh {mesh}: {mesh.size} rank{'s' * (mesh.size != 1)}")
    meanings = Table.grid(padding=(0, 2))
    for axis, parts in mesh.axes:
        meanings.add_row(f"  {axis}={parts}", Axis(axis).summary)
    console.print(meanings, highlight=False)
    section(console, "bytes on a rank")
    print_table(console, _MEMORY, _memory(told))
    section(console, "collectives of a step")
    if told.totals:
        print_table(console, _TOTALS, _totals(told))
        for part in told.per_block:
            where = f"each of {part.name}" if part.blocks > 1 else part.name or "elsewhere"
            say(console, f"{part.axis}, {where}: {words.both_passes(part.tensors)}")
    else:
        say(console, "none")
    section(console, "how it was found")
    say(console, _times(told))
    if told.solver:
        print_table(console, _SOLVER, _solver(told))
    if told.uneven:
        section(console, "dimensions that do not divide")
        for line in _uneven(told):
            say(console, line)
    if told.unknown:
        section(console, "operators without a rule, which every rank computes whole")
        print_table(console, _UNKNOWN, _unknown(told))


def details(told: Explanation, console: Console) -> None:
    """Print where parameters, buffers and activations live, and every tensor that moves."""
    axes = told.plan.mesh.names
    held = ("name", "shape", *axes, "on a rank", "bytes")
    section(console, "parameters")
    print_table(console, held, _held(told.parameters))
    if told.buffers:
        section(console, "buffers")
        print_table(console, held, _held(told.buffers))
    section(console, "the main results of the forward pass, and what is kept for the backward pass")
    made = ("module", "result of", "shape", *axes, "bytes", "kept")
    print_table(console, made, _activations(told.activations, len(axes), told.memory.kept))
    for axis in axes:
        moved = [item for item in told.transfers if item.axis == axis]
        if moved:
            section(console, f"what moves along {axis}")
            print_table(console, _TRANSFERS, _transfers(moved))
    if axes:
        console.print()
        say(console, "R: whole on every rank. S0: split along dimension 0, S0/3: each of 3 blocks of it is split.")
        say(console, "P: every rank holds a term of a sum, Pmax: a candidate for a maximum. See docs/placement.md.")


def _memory(told: Explanation) -> Iterator[Row]:
    memory = told.memory
    whole = sum(held.whole_bytes for held in told.parameters)
    yield "parameters", words.size(memory.parameters), f"of {words.size(whole)} in all"
    yield "buffers", words.size(memory.buffers), ""
    yield "gradients", words.size(memory.gradients), ""
    yield "optimizer state", words.size(memory.optimizer), told.optimizer
    yield "kept for the backward pass", words.size(memory.kept), ""
    yield "together", words.size(memory.total), "gathered parameters and temporaries come on top"
    if told.plan.memory_bytes is not None:
        yield "limit", words.size(told.plan.memory_bytes), "plan.memory_bytes"


def _totals(told: Explanation) -> Iterator[Row]:
    for total in told.totals:
        counts = str(total.tensors), str(total.collectives)
        yield total.axis, words.pass_(total.backward), total.kind, *counts, words.size(total.bytes)


def _times(told: Explanation) -> str:
    seconds = told.seconds
    return (
        f"captured in {seconds.capture:.1f} s, placed in {seconds.place:.1f} s, "
        f"cut into passes in {seconds.schedule:.1f} s"
    )


def _solver(told: Explanation) -> Iterator[Row]:
    for report in told.solver:
        costs = f"{report.objective_s * 1e3:.4g} ms", f"{report.bound_s * 1e3:.4g} ms"
        yield report.axis, *costs, str(report.classes), str(report.variables), f"{report.seconds:.1f} s"


def _uneven(told: Explanation) -> Iterator[str]:
    alike = fold(told.uneven, lambda it: it.name, lambda it: (it.shape, it.axis, it.placement, it.divisor))
    for group in alike:
        item = group.first
        placed = item.placement
        how = f"is split along dimension {placed.dim}" if isinstance(placed, Shard) else "stays whole"
        yield (
            f"{group.name} {words.shape(item.shape)} {how} over {item.axis}: {item.shape[item.dim]} does not divide by "
            f"{item.divisor}; {' or '.join(map(str, item.sizes))} would"
        )


def _unknown(told: Explanation) -> Iterator[Row]:
    for unknown in told.unknown:
        for group in fold(unknown.modules, name=str):
            yield words.module(group.name), unknown.operator, str(len(group.items))


def _held(tensors: Iterable[Held]) -> Iterator[Row]:
    alike = fold(tensors, lambda held: held.name, lambda held: (held.shape, held.placements, held.dtype, held.trained))
    for group in alike:
        held = group.first
        nbytes = words.sizes([item.bytes for item in group.items])
        also = fold((alias for item in group.items for alias in item.aliases), name=str)
        name = " = ".join([group.name, *(found.name for found in also)])
        yield name, words.shape(held.shape), *map(str, held.placements), words.shape(held.local), nbytes


def _activations(made: Iterable[Activation], axes: int, kept: int) -> Iterator[Row]:
    small: list[Activation] = []
    alike = fold(
        made, lambda it: it.name, lambda it: (it.what, it.operator, it.shape, it.placements, it.bytes, it.kept)
    )
    for group in alike:
        item = group.first
        if not item.main and sum(one.bytes for one in group.items) < _SMALL * kept:
            small.extend(group.items)
            continue
        placed = words.placed(item.placements, axes)
        nbytes = words.sizes([one.bytes for one in group.items])
        by = words.operator(item.operator)
        yield words.module(group.name), by, words.shape(item.shape), *placed, nbytes, "yes" if item.kept else ""
    if small:
        nbytes = words.size(sum(item.bytes for item in small))
        yield f"{len(small)} smaller ones", "", "", *[""] * axes, nbytes, "yes"


def _transfers(moved: Iterable[Transfer]) -> Iterator[Row]:
    alike = fold(
        moved,
        lambda it: it.name,
        lambda it: (it.what, it.operator, it.backward, it.kind, it.source, it.target, it.bytes),
    )
    for group in alike:
        item = group.first
        ends = str(item.source), str(item.target)
        nbytes = words.sizes([one.bytes for one in group.items])
        yield _moved(group.name, item), words.pass_(item.backward), item.kind, *ends, nbytes


def _moved(name: str, item: Transfer) -> str:
    """Return what is moved: a parameter or its `.grad`, or the result or gradient of an operator in a module."""
    if item.what is What.GRADIENT:
        return f"{name}.grad"
    by = f" ({words.operator(item.operator)})" if item.operator else ""
    return f"{words.module(name)}{by}{' grad' * (item.what is What.ACTIVATION_GRADIENT)}"
