"""An explanation as one JSON object; its keys are documented in `docs/placement.md` and stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from paceline.placement.placements import Placement
from paceline.planner.explanation import Activation, Explanation, Held, PerBlock, Total, Transfer, Uneven
from paceline.planner.words import pass_


def to_json(told: Explanation) -> dict[str, Any]:
    """Return the object; lists are in the order of the program, and nothing is folded."""
    axes = told.plan.mesh.names
    memory = {**asdict(told.memory), "total": told.memory.total}
    plan = {
        "mesh": str(told.plan.mesh),
        "ranks": told.plan.mesh.size,
        "plan": told.plan.to_dict(),
        "optimizer": told.optimizer,
        "memory": memory,
        "parameters": [_held(item, axes) for item in told.parameters],
        "buffers": [_held(item, axes) for item in told.buffers],
        "activations": [_activation(item, axes) for item in told.activations],
        "transfers": [_transfer(item) for item in told.transfers],
        "collectives": _collectives(told.totals, axes),
        "per_block": [_per_block(item) for item in told.per_block],
        "solver": [asdict(report) for report in told.solver],
        "uneven": [_uneven(item) for item in told.uneven],
        "unknown_operators": [
            {"operator": item.operator, "calls": len(item.modules), "modules": list(item.modules)}
            for item in told.unknown
        ],
        "seconds": asdict(told.seconds),
    }
    return {"plans": [plan]}


def _held(item: Held, axes: Sequence[str]) -> dict[str, Any]:
    return {
        "name": item.name,
        "dtype": item.dtype,
        "shape": list(item.shape),
        "placements": _placements(item.placements, axes),
        "local_shape": list(item.local),
        "bytes": item.bytes,
        "trained": item.trained,
        "aliases": list(item.aliases),
    }


def _activation(item: Activation, axes: Sequence[str]) -> dict[str, Any]:
    return {
        "what": item.what.value,
        "name": item.name,
        "operator": item.operator,
        "dtype": item.dtype,
        "shape": list(item.shape),
        "placements": _placements(item.placements, axes),
        "local_shape": list(item.local),
        "bytes": item.bytes,
        "kept": item.kept,
        "main": item.main,
    }


def _transfer(item: Transfer) -> dict[str, Any]:
    return {
        "axis": item.axis,
        "pass": pass_(item.backward),
        "kind": item.kind,
        "what": item.what.value,
        "name": item.name,
        "operator": item.operator,
        "from": str(item.source),
        "to": str(item.target),
        "bytes": item.bytes,
    }


def _uneven(item: Uneven) -> dict[str, Any]:
    return {
        "name": item.name,
        "shape": list(item.shape),
        "axis": item.axis,
        "placement": str(item.placement),
        "dimension": item.dim,
        "divisor": item.divisor,
        "sizes": list(item.sizes),
    }


def _per_block(item: PerBlock) -> dict[str, Any]:
    return {"axis": item.axis, "name": item.name, "blocks": item.blocks, **_by_pass(item.tensors)}


def _by_pass(counts: Iterable[tuple[bool, str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"forward": {}, "backward": {}}
    for backward, kind, value in counts:
        found[pass_(backward)][kind] = value
    return found


def _collectives(totals: Iterable[Total], axes: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    found = {axis: _by_pass(()) for axis in axes}
    for total in totals:
        value = {"tensors": total.tensors, "count": total.collectives, "bytes": total.bytes}
        found[total.axis][pass_(total.backward)][total.kind] = value
    return found


def _placements(placements: Sequence[Placement], axes: Sequence[str]) -> dict[str, str] | None:
    """Return placements by axis; None where they are not known."""
    if len(placements) != len(axes):
        return None
    return {axis: str(placement) for axis, placement in zip(axes, placements, strict=True)}
