from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.program.capture import batch_leaves, capture
from paceline.program.program import Input, InputRole, Output, OutputRole, Program
from tests.program.stepping import capture_as_eager, run_program

DOUBLE = torch.float64


def names(program: Program, role: InputRole) -> list[str]:
    return [item.name for item in program.inputs if item.role is role]


def gradients(program: Program) -> list[str]:
    return [item.name for item in program.outputs if item.role is OutputRole.GRADIENT]


def targets(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


class Regression(nn.Module):
    """Takes its batch in every form: tensors, None, numbers and nested values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=DOUBLE)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        scale: float = 1.0,
        extra: dict[str, Any] | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        y = self.linear(x) * scale
        if mask is not None:
            y = torch.where(mask, y, 0.0)
        if extra is not None:
            y = y + extra["offsets"][0] - extra["table"][extra["index"]]
        return y.square().mean() if reduction == "mean" else y.square().sum()


def x(batch: int = 6) -> Tensor:
    return torch.linspace(-1, 1, batch * 4, dtype=DOUBLE).view(batch, 4)


NESTED = {
    "x": x(),
    "mask": torch.arange(18).view(6, 3) % 3 > 0,
    "scale": 0.5,
    "extra": {
        "offsets": [torch.ones(3, dtype=DOUBLE)],
        "table": torch.eye(3, dtype=DOUBLE),
        "index": torch.arange(6) % 3,
    },
    "reduction": "sum",
}


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((x(),), ["0"]),
        ((x(), None, 2.0), ["0"]),
        ({"x": x(), "mask": None}, ["x"]),
        (NESTED, ["x", "mask", "extra.offsets.0", "extra.table", "extra.index"]),
    ],
    ids=["tuple", "none and number", "keywords", "nested"],
)
def test_a_batch_of_any_form(batch: Any, expected: list[str]) -> None:
    program = capture_as_eager(Regression(), batch)
    assert names(program, InputRole.BATCH) == expected
    assert gradients(program) == ["linear.weight", "linear.bias"]


def test_values_that_are_no_tensors_are_constants() -> None:
    programs = [capture(Regression(), (x(), None, scale)) for scale in (2.0, 3.0)]
    assert programs[0].graph.python_code("self").src != programs[1].graph.python_code("self").src


def test_leaves_are_named_by_path() -> None:
    leaves = batch_leaves({"labels": 1, "inputs": {"pixels": 2, "sizes": (3, [4])}})
    assert leaves == {"labels": 1, "inputs.pixels": 2, "inputs.sizes.0": 3, "inputs.sizes.1.0": 4}
    assert list(batch_leaves((7, [8, 9]))) == ["0", "1.0", "1.1"]


@pytest.mark.parametrize("shape", ["scalar", "one element", ".loss", '"loss"'])
def test_every_form_of_a_loss(shape: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1, dtype=DOUBLE)

        def forward(self, x: Tensor) -> Any:
            loss = self.linear(x).square().mean()
            return {
                "scalar": loss,
                "one element": loss.reshape(1, 1),
                ".loss": SimpleNamespace(loss=loss, logits=x),
                '"loss"': {"logits": x, "loss": loss},
            }[shape]

    capture_as_eager(Model(), (x(),))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8, dtype=DOUBLE)
        self.middle = nn.Linear(8, 8, bias=False, dtype=DOUBLE)
        self.head = nn.Linear(8, 11, bias=False, dtype=DOUBLE)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.middle(self.token(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def test_tied_parameters_are_one_input_with_the_sum_of_their_gradients() -> None:
    program = capture_as_eager(Tied(), (torch.arange(24).view(4, 6) % 11,))
    assert names(program, InputRole.PARAMETER) == ["token.weight", "middle.weight"]
    assert gradients(program) == ["token.weight", "middle.weight"]
    assert program.aliases == {"head.weight": "token.weight"}


class Counting(nn.Module):
    """Buffers of several kinds that the forward pass changes, one that it only reads, one that it ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2, dtype=DOUBLE)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("average", torch.zeros(2, dtype=DOUBLE))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("scale", torch.full((), 3.0, dtype=DOUBLE))
        self.register_buffer("unused", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale
        self.calls += 1
        self.average.lerp_(y.detach().mean(0), 0.25)
        self.seen = self.seen | (y > 0).any(0)
        return (y - self.average).square().mean()


def test_buffers_that_change_are_outputs() -> None:
    module = Counting()
    program = capture_as_eager(module, (x(),))
    changed = {item.name for item in program.outputs if item.role is OutputRole.BUFFER}
    assert changed == {"calls", "average", "seen"}
    assert int(run_program(program, module, (x(),)).buffers["calls"]) == 1
    assert int(module.calls) == 0, "capture leaves the module as it was"


def test_capture_leaves_the_module_and_the_generator_alone() -> None:
    module = nn.ModuleList([Counting(), nn.Dropout(0.5)])
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    capture(module[0], (x(),))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8, dtype=DOUBLE)
        self.drops = nn.ModuleList([nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Dropout(0.0), nn.Dropout(1.0)])
        self.images = nn.Dropout2d(0.4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        first, second, third, _ = self.drops
        y = third(second(first(y))) + F.dropout(y, 0.5, self.training)
        y = y + self.images(y.view(-1, 4, 2, 1)).view(y.shape) + torch.randn_like(y)
        return y.square().mean() + self.drops[3](y).sum()


def test_random_draws_are_those_of_the_eager_module() -> None:
    capture_as_eager(Noisy(), (x(),))


@pytest.mark.parametrize(
    "laid_out",
    [
        lambda y: y.transpose(0, 1),
        lambda y: y.view(-1, 2, 2, 2).to(memory_format=torch.channels_last),
        lambda y: y.view(-1, 4, 2).permute(2, 0, 1)[:, ::2],
        lambda y: y.unsqueeze(0).expand(3, -1, -1),
    ],
    ids=["transposed", "channels last", "permuted and cut", "expanded"],
)
def test_masks_of_dropout_are_drawn_in_the_order_of_memory(laid_out: Callable[[Tensor], Tensor]) -> None:
    class Model(Regression):
        def forward(self, x: Tensor) -> Tensor:
            y = laid_out(self.linear(x))
            return (F.dropout(y, 0.5) + torch.randn_like(y)).square().mean()

    model = Model()
    model.linear = nn.Linear(4, 8, dtype=DOUBLE)
    capture_as_eager(model, (x(),))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("sizes", [{"num_layers": 3}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
def test_recurrent_networks_drop_out_between_layers(kind: type[nn.RNNBase], sizes: dict[str, Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(4, 3, dropout=0.4, dtype=DOUBLE, **sizes)

        def forward(self, x: Tensor) -> Tensor:
            y, last = self.layers(x)
            return y.square().mean() + sum(part.mean() for part in torch.utils._pytree.tree_leaves(last))

    program = capture_as_eager(Model(), (x(6).view(3, 2, 4),))
    assert targets(program).count("aten.bernoulli.p") == sizes["num_layers"] - 1


def test_strides_that_only_reshape_are_shapes() -> None:
    class Pooled(Regression):
        """A pool over all of an input in channels last, for which PyTorch sets strides."""

        def forward(self, x: Tensor) -> Tensor:
            return F.adaptive_avg_pool1d(self.linear(x).transpose(1, 2), 1).flatten(1).square().mean()

    program = capture_as_eager(Pooled(), (x(6).view(2, 3, 4),))
    assert not [target for target in targets(program) if "as_strided" in target]

    class Windows(Regression):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).flatten().unfold(0, 4, 2).as_strided((3, 2), (2, 1), 1).square().mean()

    assert "aten.as_strided.default" in targets(capture_as_eager(Windows(), (x(6),)))


@pytest.mark.parametrize("batch", [4, 6])
def test_each_batch_shape_has_its_own_program(batch: int) -> None:
    capture_as_eager(Regression(), (x(batch),))


def test_evaluation_has_no_backward_pass() -> None:
    module = Noisy().eval()
    program = capture(module, (x(),))
    assert not program.training
    assert not names(program, InputRole.TANGENT)
    assert [item.role for item in program.outputs] == [OutputRole.LOSS]
    assert "aten.bernoulli.p" not in targets(program)
    loss = run_program(program, module, (x(),), seed=1).loss
    torch.manual_seed(1)
    torch.testing.assert_close(loss, module(x()).detach())


class Clamp(torch.autograd.Function):
    """Straight through: its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2.5 * gradient


def test_a_custom_backward_is_kept() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3, dtype=DOUBLE)

        def forward(self, x: Tensor) -> Tensor:
            return Clamp.apply(3 * self.linear(x)).square().mean()

    module = Quantised()
    program = capture_as_eager(module, (x(),))
    assert run_program(program, module, (x(),)).gradients["linear.weight"].abs().max() > 0


def test_gradients_taken_inside_the_forward_pass() -> None:
    class Penalised(nn.Module):
        """The gradient penalty of a critic: a derivative of a derivative."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8, dtype=DOUBLE), nn.Tanh(), nn.Linear(8, 1, dtype=DOUBLE))

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            y = self.layers(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y.mean() + (slope.norm(dim=1) - 1).square().mean()

    capture_as_eager(Penalised(), (x(),))


def test_frozen_parameters_are_inputs_without_a_gradient() -> None:
    module = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Linear(4, 4, dtype=DOUBLE))
    module[0].requires_grad_(False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    program = capture_as_eager(Model(), (x(),))
    assert "layers.0.weight" in names(program, InputRole.PARAMETER)
    assert gradients(program) == ["layers.1.weight", "layers.1.bias"]


def test_a_parameter_that_the_loss_ignores() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 1, dtype=DOUBLE), nn.Linear(4, 1, dtype=DOUBLE)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x).square().mean()

    program = capture_as_eager(Model(), (x(),))
    assert gradients(program) == ["used.weight", "used.bias"]


def test_tensors_made_in_the_forward_pass_are_constants() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3, dtype=DOUBLE)
            self.table = torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE)  # neither parameter nor buffer

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.table * torch.tensor(2.0)).square().mean()

    program = capture_as_eager(Model(), (x(),))
    assert program.constants
    assert all(not isinstance(value, torch._subclasses.FakeTensor) for value in program.constants.values())


def test_operators_know_the_module_that_called_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4, dtype=DOUBLE) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x.mean()

    program = capture(Model(), (x(),))
    forward = [n for n in program.graph.nodes if n.op == "call_function" and not n.meta["backward"]]
    assert [n.meta["module"] for n in forward if "addmm" in str(n.target)] == ["blocks.0", "blocks.1"]
    backward = [n for n in program.graph.nodes if n.op == "call_function" and n.meta["backward"]]
    assert {n.meta["module"] for n in backward if "mm" in str(n.target)} == {"blocks.0", "blocks.1"}


def test_parameters_have_their_own_names_in_order() -> None:
    module = Tied()
    program = capture(module, (torch.arange(12).view(2, 6) % 11,))
    assert names(program, InputRole.PARAMETER) == [name for name, _ in module.named_parameters()]
    assert program.outputs[:2] == (Output(OutputRole.LOSS, "loss"), Output(OutputRole.WEIGHT, "loss"))
    assert program.inputs[-1] == Input(InputRole.TANGENT, "loss")
