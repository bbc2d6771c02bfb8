"""`Plan.recompute`: which forward calls are made again, and that nothing but memory changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.errors import PlanError
from paceline.placement.place import place
from paceline.plan import Mesh, Plan, Recompute
from paceline.program.capture import capture
from paceline.program.program import Program
from paceline.program.rematerialize import block_of, recomputed
from paceline.runtime.step import Step, schedule
from tests import models

WIDTH, BATCH, BLOCKS = 8, 4, 3
X = torch.linspace(-1, 1, BATCH * WIDTH, dtype=torch.float64).view(BATCH, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up, self.down = (
            nn.Linear(WIDTH, 5 * WIDTH, dtype=torch.float64),
            nn.Linear(5 * WIDTH, WIDTH, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def planned(program: Program, policy: Recompute) -> Step:
    plan = Plan(recompute=policy)
    return schedule(place(program.copy(), plan), plan)


def saved(step: Step) -> list[Node]:
    """What is kept for the backward pass, parameters aside."""
    nodes = step.forward.find_nodes(op="output")[0].args[0][len(step.outputs) :]
    return [node for node in nodes if node.op != "placeholder"]


def saved_bytes(step: Step) -> int:
    return sum(node.meta["val"].nbytes for node in saved(step))


def count(step: Step, operator: str) -> int:
    assert step.backward is not None
    return sum(operator in str(node.target) for node in step.backward.nodes if node.op == "call_function")


def test_of_a_block_only_what_comes_in_is_kept() -> None:
    program = capture(Tower(), (X,))
    plain, lean = planned(program, Recompute.NONE), planned(program, Recompute.BLOCKS)
    one = X.nbytes
    # the sine's input and output, and what each block hands on
    assert saved_bytes(lean) == (2 + BLOCKS) * one
    assert saved_bytes(plain) > saved_bytes(lean) + 2 * BLOCKS * 5 * one
    assert (count(plain, "tanh.default"), count(lean, "tanh.default")) == (0, BLOCKS)
    # the last product of a block leads out of it, and is never needed again
    assert count(lean, "addmm") == BLOCKS


def test_each_block_is_made_again_right_before_its_own_gradients() -> None:
    lean = planned(capture(Tower(), (X,)), Recompute.BLOCKS)
    assert lean.backward is not None
    order = [str(node.target) for node in lean.backward.nodes if node.op == "call_function"]
    again = [place for place, name in enumerate(order) if name == "aten.tanh.default"]
    gradients = [place for place, name in enumerate(order) if "layer_norm_backward" in name]
    assert again[0] < gradients[0] < again[1] < gradients[1] < again[2] < gradients[2]


def test_attention_that_is_written_out_is_made_again_from_queries_and_keys() -> None:
    module, batch = models.gpt(dropout=0.1)
    program = capture(module, batch)
    plain, lean = planned(program, Recompute.NONE), planned(program, Recompute.ATTENTION)
    assert saved_bytes(lean) < saved_bytes(plain)
    assert not [node for node in saved(lean) if "safe_softmax" in str(node.target)]
    assert (count(plain, "safe_softmax"), count(lean, "safe_softmax")) == (0, 2)
    products = count(lean, "aten.bmm") - count(plain, "aten.bmm")
    assert products == 2, "scores are made again, what leaves attention is not"
    assert count(lean, "bernoulli") == 0  # drawn once


def test_fused_attention_is_left_alone() -> None:
    module, batch = models.llama()
    program = capture(module, batch)
    lean, plain = recomputed(program, Recompute.ATTENTION), program
    assert [node.meta["rematerialize"] for node in lean.graph.nodes if "rematerialize" in node.meta] == [
        node.meta["rematerialize"] for node in plain.graph.nodes if "rematerialize" in node.meta
    ]


def test_the_program_itself_stays_as_it_is() -> None:
    program = capture(Tower(), (X,))
    place(program, Plan(Mesh.parse("dp=2"), recompute=Recompute.BLOCKS))
    assert not any(node.meta.get("rematerialize") for node in program.graph.nodes)


@pytest.mark.parametrize(
    ("name", "block"),
    [("blocks.0.qkv", "blocks.0"), ("model.layers.11", "model.layers.11"), ("0.qkv", None), ("head", None)],
)
def test_blocks_are_found_by_name(name: str, block: str | None) -> None:
    assert block_of(name) == block


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(PlanError, match=r"recompute is 'block'; it is one of none, attention, blocks\. Did you mean"):
        Plan.from_dict({"recompute": "block"})


def test_a_plan_is_read_back() -> None:
    plan = Plan(Mesh.parse("dp=2"), recompute=Recompute.BLOCKS)
    assert plan.to_dict()["recompute"] == "blocks"
    assert Plan.from_dict(plan.to_dict()) == plan
