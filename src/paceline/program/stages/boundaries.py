"""Cuts that a user names, and cuts of an earlier pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

from paceline.errors import PlanError, nearest
from paceline.program.stages.groups import Group, groups_of
from paceline.program.stages.pipeline import Pipeline


def at_modules(groups: Sequence[Group], modules: Sequence[str], count: int) -> tuple[int, ...]:
    """Return the groups with which stages begin, where each begins with the first call of a module.

    Raises:
        PlanError: a module is unknown or calls nothing, or stages cannot be separated there.
    """
    if len(modules) != count - 1:
        raise PlanError(
            f"{count} stages have {count - 1} boundaries, and {len(modules)} were given: {', '.join(modules)}. Name "
            "the modules with which stages 1 and up begin."
        )
    number_of = groups_of(groups)
    firsts = [_first(number_of, name) for name in modules]
    starts = tuple(number_of[node] for node in firsts)
    for before, here, node, name in zip((0, *starts), starts, firsts, modules, strict=False):
        if here <= before or _parts_a_buffer(groups[here], node):
            raise PlanError(f"no stage can begin with the module '{name}': {_reason(groups[here], before, here)}")
    return starts


def module_starts(groups: Sequence[Group]) -> dict[int, str]:
    """Return the groups with which a module begins where a stage may begin, and the name of the outermost such one."""
    firsts: dict[str, tuple[int, Node]] = {}
    for number, group in enumerate(groups):
        for node in group.nodes:
            parts = str(node.meta.get("module") or "").split(".")
            for length in range(1, len(parts) + 1):
                firsts.setdefault(".".join(parts[:length]), (number, node))
    starts: dict[int, str] = {}
    for name, (number, node) in firsts.items():
        if name and number and not _parts_a_buffer(groups[number], node):
            starts.setdefault(number, name)
    return dict(sorted(starts.items()))


def at_nodes(groups: Sequence[Group], names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the groups that begin with nodes of these names; None where there are no such groups."""
    begins = {group.nodes[0].name: number for number, group in enumerate(groups)}
    starts = [begins.get(name) for name in names]
    return None if None in starts else tuple(start for start in starts if start is not None)


def are_alike(one: Pipeline, other: Pipeline) -> bool:
    """Whether two pipelines differ in shapes only."""
    return _form(one) == _form(other)


def _form(pipeline: Pipeline) -> list[object]:
    parts = [part for stage in pipeline.stages for part in (stage.forward, stage.backward) if part is not None]
    calls = [[(node.op, str(node.target)) for node in part.graph.nodes] for part in parts]
    ends = [(part.inputs, part.outputs) for part in parts]
    return [calls, ends, pipeline.forward_edges, pipeline.backward_edges]


def _first(nodes: Iterable[Node], module: str) -> Node:
    known: dict[str, None] = {}
    for node in nodes:
        path = str(node.meta.get("module") or "")
        if path == module or path.startswith(f"{module}."):
            return node
        parts = path.split(".")
        known.update((".".join(parts[:length]), None) for length in range(1, len(parts) + 1))
    raise PlanError(
        f"no operator of the program is called by a module '{module}'.{nearest(module, known)} Modules with operators "
        f"are {', '.join(list(known)[:20])}{', ...' if len(known) > 20 else ''}."
    )


def _parts_a_buffer(group: Group, node: Node) -> bool:
    """Whether a buffer holds the first call of a module together with one of a module before, not one around it."""
    path = str(node.meta.get("module") or "")
    before = [str(other.meta.get("module") or "") for other in group.nodes[: group.nodes.index(node)]]
    return bool(group.buffers) and any(other and not f"{path}.".startswith(f"{other}.") for other in before)


def _reason(group: Group, before: int, here: int) -> str:
    if group.buffers:
        names = ", ".join(f"'{name}'" for name in group.buffers)
        return (
            f"the buffer {names} is read and changed on both sides of it, and must be in one stage. Choose another "
            "boundary."
        )
    if here < before:
        return "it is called before the module that the stage before begins with. Name modules in the order of calls."
    return "nothing that can be separated from it is called before it in that stage. Choose another boundary."
