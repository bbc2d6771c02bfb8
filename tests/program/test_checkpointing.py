"""torch.utils.checkpoint: what it wraps is recomputed in the backward pass, and the gradients stay."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from paceline.placement.place import place
from paceline.plan import Mesh, Plan
from paceline.program.program import Program
from paceline.runtime.step import Step, schedule
from tests.program.stepping import capture_as_eager

WIDTH, HIDDEN, BATCH = 6, 50, 4
X = torch.linspace(-1, 1, BATCH * WIDTH, dtype=torch.float64).view(BATCH, WIDTH)


class Model(nn.Module):
    """Two wide blocks; nothing else in the program has a dimension of HIDDEN but parameters."""

    def __init__(self, wrap: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.wrap, self.dropout = wrap, dropout
        self.wide = nn.ModuleList([nn.Linear(WIDTH, HIDDEN, dtype=torch.float64) for _ in range(2)])
        self.narrow = nn.ModuleList([nn.Linear(HIDDEN, WIDTH, dtype=torch.float64) for _ in range(2)])

    def block(self, number: int, x: Tensor) -> Tensor:
        y = torch.tanh(self.wide[number](x)).square()
        return x + self.narrow[number](F.dropout(y, self.dropout, self.training))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(2):
            x = self.wrap(functools.partial(self.block, number), x)
        return x.square().mean()


WRAPS: dict[str, Any] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "sequential": lambda block, x: checkpoint_sequential([block, nn.Identity()], 2, x, use_reentrant=False),
}


def planned(program: Program) -> Step:
    return schedule(place(program, Mesh()), Plan())


def saved_activations(step: Step) -> list[tuple[int, ...]]:
    """Shapes of what the forward graph keeps for the backward one, without parameters."""
    nodes = step.forward.find_nodes(op="output")[0].args[0][len(step.outputs) :]
    return [tuple(node.meta["val"].shape) for node in nodes if node.op != "placeholder"]


def is_wide(shape: tuple[int, ...]) -> bool:
    return shape == (BATCH, HIDDEN)


def count(step: Step, operator: str) -> int:
    assert step.backward is not None
    return sum(operator in str(node.target) for node in step.backward.nodes if node.op == "call_function")


@pytest.mark.parametrize("kind", WRAPS)
def test_what_is_wrapped_is_recomputed(kind: str) -> None:
    x = X.clone().requires_grad_(kind == "reentrant")  # as that variant wants it
    step = planned(capture_as_eager(Model(WRAPS[kind]), (x,)))
    assert not [shape for shape in saved_activations(step) if is_wide(shape)]
    assert count(step, "aten.tanh.default") == 2
    plain = planned(capture_as_eager(Model(lambda block, x: block(x)), (X,)))
    assert [shape for shape in saved_activations(plain) if is_wide(shape)]
    assert count(plain, "aten.tanh.default") == 0


def test_what_a_checkpoint_returns_is_kept() -> None:
    """Else the first checkpoint that the backward pass comes to makes all those before it again, and holds them."""
    step = planned(capture_as_eager(Model(WRAPS["not reentrant"]), (X,)))
    assert saved_activations(step) == [(BATCH, WIDTH)] * 2
    assert step.backward is not None
    order = [str(node.target) for node in step.backward.nodes if node.op == "call_function"]
    products = [place for place, name in enumerate(order) if name == "aten.mm.default"]
    second = [place for place, name in enumerate(order) if name == "aten.tanh.default"][1]
    assert second > products[0], "the earlier block is made again after gradients of the later one"


def test_a_checkpoint_inside_of_another_is_a_part_of_it() -> None:
    def both(block: Any, x: Tensor) -> Tensor:
        return WRAPS["not reentrant"](lambda x: torch.cos(WRAPS["not reentrant"](block, x)), x)

    step = planned(capture_as_eager(Model(both), (X,)))
    assert saved_activations(step) == [(BATCH, WIDTH)] * 2
    assert count(step, "aten.cos.default") == 0
    assert count(step, "aten.tanh.default") == 2


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_dropout_in_a_checkpoint_is_drawn_once(kind: str) -> None:
    x = X.clone().requires_grad_(kind == "reentrant")
    step = planned(capture_as_eager(Model(WRAPS[kind], dropout=0.4), (x,)))
    assert count(step, "bernoulli") == 0
    assert [str(n.target) for n in step.forward.nodes].count("aten.bernoulli.p") == 2
    assert count(step, "aten.tanh.default") == 2


def test_only_what_is_wrapped_is_recomputed() -> None:
    def first_only(block: Any, x: Tensor) -> Tensor:
        return WRAPS["not reentrant"](block, x) if block.args[0] == 0 else block(x)

    step = planned(capture_as_eager(Model(first_only), (X,)))
    assert count(step, "aten.tanh.default") == 1
    assert any(map(is_wide, saved_activations(step)))


def test_a_checkpoint_in_evaluation_and_under_no_grad() -> None:
    model = Model(WRAPS["not reentrant"]).eval()
    step = planned(capture_as_eager_in_eval(model))
    assert step.backward is None


def capture_as_eager_in_eval(model: nn.Module) -> Program:
    with torch.no_grad():
        return capture_as_eager(model, (X,))


@pytest.mark.parametrize("reentrant", [True, False])
def test_hugging_face_gradient_checkpointing(reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = torch.arange(24).view(3, 8) % 64
    step = planned(capture_as_eager(model, {"input_ids": ids, "labels": ids}, tolerance=1e-4))
    assert count(step, "aten.silu.default") == 2
    assert not [shape for shape in saved_activations(step) if shape[-1:] == (40,)]
