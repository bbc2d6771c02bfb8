from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.placement.place import place
from paceline.plan import Mesh, Plan
from paceline.program.capture import capture
from paceline.program.program import OutputRole
from paceline.runtime import collectives
from paceline.runtime.passes.partition import partition
from paceline.runtime.step import Step
from paceline.runtime.stored import step_from_json, step_to_json
from tests.runtime.steps import (
    WIDTH,
    Stack,
    batch,
    called,
    graphs,
    layout,
    members,
    nbytes,
    stack,
    started,
)

ROOT = Path(__file__).parents[2]
WEIGHTS = {(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)}


@pytest.fixture(scope="module", params=["dp=2", "fsdp=2", "dp=2,fsdp=3", "fsdp=3,dp=2"])
def step(request: pytest.FixtureRequest) -> Step:
    return stack(request.param, bucket_bytes=1024)


def test_every_collective_is_started_once_and_waited_for_once_before_it_is_read(step: Step) -> None:
    for graph in graphs(step):
        graph.lint()
        found = started(graph)
        assert found
        assert len(called(graph, collectives.wait)) == len(found)
        for start, wait, read, _ in found:
            assert start < wait < read


def test_no_redistribution_is_left(step: Step) -> None:
    for graph in graphs(step):
        assert not [node for node in graph.nodes if getattr(node.target, "__name__", "") == "redistribute"]


def test_buckets_close_when_they_are_full(step: Step) -> None:
    assert step.backward is not None
    for graph in graphs(step):
        for *_, start in started(graph):
            sizes = [nbytes(member) for member in members(start)]
            if start.target is collectives.all_gather:
                sizes = [size * start.args[2] for size in sizes]  # type: ignore[operator]
            assert sum(sizes[:-1]) < 1024, f"{start.target} went on after it was full: {sizes}"


def test_small_gradients_share_collectives(step: Step) -> None:
    assert step.backward is not None
    merged = started(step.backward)
    single = started(stack(str(step.mesh), bucket_bytes=0).backward)  # type: ignore[arg-type]
    assert len(merged) < len(single)
    assert all(len(members(start)) == 1 for *_, start in single)


def test_parameters_are_gathered_one_bucket_ahead() -> None:
    for graph in graphs(stack("fsdp=2", bucket_bytes=1024)):
        gathers = [found for found in started(graph) if found[3].target is collectives.all_gather]
        assert len(gathers) > 3
        waits = [wait for _, wait, *_ in gathers]
        assert waits == sorted(waits), "they start in the order in which they are read"
        compute = [n for n in graph.nodes if n.target in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)]
        order = {node: position for position, node in enumerate(graph.nodes)}
        overlaps = sum(any(start < order[node] < wait for node in compute) for start, wait, *_ in gathers)
        assert overlaps >= len(gathers) - 4, "nearly all arrive behind a matrix product"
        for start, *_ in gathers:
            assert sum(other[0] < start < other[1] for other in gathers) <= 1, "at most two are in flight"


def test_a_large_gradient_is_reduced_without_a_copy() -> None:
    step = stack("dp=2", bucket_bytes=1024)
    assert step.backward is not None
    single = [start for *_, start in started(step.backward) if len(members(start)) == 1]
    assert {start.target for start in single} == {collectives.all_reduce_in_place}


def test_gradients_are_reduced_while_the_backward_pass_goes_on() -> None:
    step = stack("dp=2", bucket_bytes=1024)
    assert step.backward is not None
    order = {node: position for position, node in enumerate(step.backward.nodes)}
    last_product = max(order[node] for node in called(step.backward, torch.ops.aten.mm.default))
    assert sum(start < last_product for start, *_ in started(step.backward)) >= 3
    assert all(wait > last_product for _, wait, *_ in started(step.backward))


def saved(step: Step) -> list[tuple[int, ...]]:
    (output,) = step.forward.find_nodes(op="output")
    return [tuple(n.meta["val"].shape) for n in output.args[0][len(step.outputs) :] if n.op != "placeholder"]


def test_zero_3_gathers_again_in_the_backward_pass_and_zero_2_keeps() -> None:
    three, two = stack("fsdp=2", zero_stage=3), stack("fsdp=2", zero_stage=2)
    assert three.backward is not None and two.backward is not None
    assert not WEIGHTS & set(saved(three))
    assert WEIGHTS & set(saved(two))
    assert called(three.backward, collectives.all_gather)
    assert not called(two.backward, collectives.all_gather)
    assert len(called(three.forward, collectives.all_gather)) == len(called(two.forward, collectives.all_gather))


def test_the_forward_graph_returns_outputs_and_then_what_the_backward_graph_reads(step: Step) -> None:
    assert step.backward is not None
    (output,) = step.forward.find_nodes(op="output")
    kept = len(output.args[0]) - len(step.outputs)
    assert len(step.backward.find_nodes(op="placeholder")) == kept + 1
    (gradients,) = step.backward.find_nodes(op="output")
    assert len(gradients.args[0]) == len(step.gradients) == 6 * 4
    assert len(step.forward.find_nodes(op="placeholder")) == len(step.inputs)
    assert not [node for node in step.forward.nodes if node.meta.get("backward")]


def test_nothing_is_computed_for_nobody(step: Step) -> None:
    for graph in graphs(step):
        assert all(node.users or node.op in ("placeholder", "output") for node in graph.nodes)


def test_evaluation_has_one_graph() -> None:
    program = capture(Stack().eval(), batch())
    parts = partition(place(program, Mesh.parse("dp=2")).program)
    assert parts.backward is None and parts.gradients == ()


def test_what_the_forward_pass_returns_is_computed_there() -> None:
    class Norms(nn.Module):
        """Keeps a gradient that it takes itself: traced among the operators of the backward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 1, dtype=torch.float64)
            self.register_buffer("slope", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            y = self.linear(x).tanh()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            self.slope = slope.norm()
            return y.square().mean() + self.slope

    parts = partition(place(capture(Norms(), batch()), Mesh.parse("dp=2")).program)
    assert [output.role for output in parts.forward_outputs] == [OutputRole.LOSS, OutputRole.BUFFER]
    parts.forward.lint()
    assert parts.backward is not None
    parts.backward.lint()


def test_equal_programs_have_equal_steps() -> None:
    first, second = (list(layout(stack("dp=2,fsdp=2", bucket_bytes=1024))) for _ in range(2))
    assert first == second


def test_a_step_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import json; from tests.runtime.steps import stack; from paceline.runtime.stored import step_to_json;"
        "print(json.dumps(step_to_json(stack('dp=2,fsdp=2', bucket_bytes=1024))))"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"  # not that of this process
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(["src", "."])},
        stdout=subprocess.PIPE,
        text=True,
    )
    here = step_to_json(stack("dp=2,fsdp=2", bucket_bytes=1024))
    found, _ = other.communicate()
    assert other.returncode == 0
    assert json.loads(found) == json.loads(json.dumps(here))


@pytest.mark.parametrize("fakes", [False, True])
def test_a_stored_step_is_the_same_step(step: Step, fakes: bool) -> None:
    data = json.loads(json.dumps(step_to_json(step)))
    again = step_from_json(data, step.constants, fakes=fakes)
    assert list(layout(again)) == list(layout(step))
    assert (again.inputs, again.outputs, again.gradients) == (step.inputs, step.outputs, step.gradients)
    assert step_to_json(again) == data
    assert again.mesh == step.mesh == Plan.from_dict({"mesh": str(step.mesh)}).mesh
