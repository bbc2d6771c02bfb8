"""The same program is placed alike in every process, and a deep model is as hard to solve as a shallow one."""

from __future__ import annotations

import hashlib
import operator
import os
import subprocess
import sys
from typing import Any

import pytest
from torch import Tensor

from paceline.placement.calls import Kinds
from paceline.placement.place import PlacedProgram, place
from paceline.plan import Mesh
from tests.placement.deep import deep_program

MESHES = ("auto=2", "dp=2,tp=2")


def fingerprint(placed: PlacedProgram) -> str:
    """Return what every rank must agree on: each node with its arguments, its value and where it came from."""

    def written(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(written, value))}]"
        if isinstance(value, Tensor):
            return f"{list(value.shape)} {value.stride()} {value.dtype}"
        return value.__name__ if callable(value) else str(value)

    lines = [str(placed.placements)]
    for node in placed.program.graph.nodes:
        origins = node.meta.get("origins")
        lines.append(
            f"{node.name} {written(node.target)} {written(node.args)} {written(node.meta.get('val'))} {origins}"
        )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_a_placement_depends_neither_on_the_process_nor_on_its_hashes() -> None:
    script = (
        "from tests.placement.deep import deep_program\n"
        "from tests.placement.test_solver_determinism import MESHES, Mesh, fingerprint, place\n"
        "for mesh in MESHES: print(fingerprint(place(deep_program(2), Mesh.parse(mesh))))"
    )
    command = [sys.executable, "-c", script]
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"  # not that of this process
    other = subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
    try:
        here = [fingerprint(place(deep_program(2), Mesh.parse(mesh))) for mesh in MESHES]
        found, _ = other.communicate(timeout=1200)
        assert other.returncode == 0
        assert found.split() == here
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "tp=2", "dp=2,tp=2"])
def test_a_deep_model_has_as_many_classes_as_a_shallow_one(mesh: str) -> None:
    shallow, deep = (place(deep_program(layers), Mesh.parse(mesh)) for layers in (5, 8))
    assert len(deep.program.graph.nodes) > 1.5 * len(shallow.program.graph.nodes)
    for few, many in zip(shallow.reports, deep.reports, strict=True):
        assert (few.classes, few.variables) == (many.classes, many.variables)


def test_calls_that_are_alike_are_of_one_kind() -> None:
    kinds = Kinds()
    program = deep_program(5)
    calls = [n for n in program.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    found = [kinds.of(node)[0] for node in calls]
    assert len(kinds.calls) == max(found) + 1 < len(calls) / 2
    for node, kind in zip(calls, found, strict=True):
        call = kinds.calls[kind]
        assert call.target is node.target
        value = node.meta["val"]
        shapes = [tuple(v.shape) for v in (value if isinstance(value, (list, tuple)) else [value]) if v is not None]
        assert [shape for shape in call.outputs if shape is not None] == shapes
