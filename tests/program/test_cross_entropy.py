"""Cross-entropies of captured programs that are written in few passes, and their operators."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.placement.calls import results
from paceline.program.capture import capture
from paceline.program.program import Program
from tests.program.stepping import capture_as_eager

ours = torch.ops.paceline
aten = torch.ops.aten
N, FEATURES, CLASSES = 288, 4, 256
WEIGHT = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


class Head(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], classes: int = CLASSES) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, classes, dtype=torch.float64)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.linear(x), y)


def batch(classes: int = CLASSES, ignored: int = -100) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    y = torch.randint(classes, (N,))
    y[::3] = ignored
    return torch.randn(N, FEATURES, dtype=torch.float64) * 50, y


def calls(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def squared(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none", weight=WEIGHT).square().sum()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "mean": (F.cross_entropy, -100),
    "an ignored class": (lambda x, y: F.cross_entropy(x, y, ignore_index=5), 5),
    "sum": (lambda x, y: F.cross_entropy(x, y, reduction="sum"), -100),
    "class weights": (lambda x, y: F.cross_entropy(x, y, weight=WEIGHT), -100),
    "each": (squared, -100),
    "masked classes": (lambda x, y: F.cross_entropy(x.masked_fill(x < -100, -torch.inf), y.clamp(max=0)), -100),
    "twice": (lambda x, y: F.cross_entropy(x, y) + F.nll_loss(x.log_softmax(1), y.flip(0), reduction="sum"), -100),
    "two losses of one softmax": (lambda x, y: _both(x.log_softmax(-1), y), -100),
}


CUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shifted": lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "contiguous": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].contiguous().view(-1), ignore_index=3
    ),
    "a prompt is cut": lambda x, y: F.cross_entropy(x[:, 2:17].reshape(-1, CLASSES), y[:, 3:].reshape(-1)),
    "class weights": lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten(), WEIGHT),
    "strided": lambda x, y: F.cross_entropy(x.transpose(0, 1)[:, :-1].flatten(0, 1), y.T[:, 1:].flatten()),
}
LEFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "most is cut": lambda x, y: F.cross_entropy(x[:, :4].flatten(0, 1), y[:, :4].flatten()),
    "smooth": lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten(), label_smoothing=0.1),
    "each": lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="none").norm(),
    "every other": lambda x, y: F.cross_entropy(x[:, ::2].flatten(0, 1), y[:, ::2].flatten()),
    "classes are cut": lambda x, y: F.cross_entropy(x[:, :-1, :-1].flatten(0, 1), y[:, 1:].clamp(max=9).flatten()),
    "the part is read again": lambda x, y: (
        (z := x[:, :-1].flatten(0, 1)).mean() + F.cross_entropy(z, y[:, 1:].flatten())
    ),
}


def sequences() -> tuple[Tensor, Tensor]:
    x, y = batch()
    return x.view(16, 18, FEATURES), y.view(16, 18).clamp(min=0)


@pytest.mark.parametrize("name", CUTS)
def test_sequences_are_not_cut_and_lengthened_again(name: str) -> None:
    program = capture_as_eager(Head(CUTS[name]), sequences())
    assert "aten.slice_backward.default" not in calls(program)
    cut = [node for node in program.graph.nodes if node.target is aten.slice.Tensor and node.meta["val"].ndim == 3]
    assert not cut


@pytest.mark.parametrize("name", LEFT)
def test_sequences_that_are_cut_otherwise_are_left(name: str) -> None:
    program = capture_as_eager(Head(LEFT[name]), sequences())
    assert "aten.constant_pad_nd.default" not in calls(program)


def _both(z: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(z, y) * 2 + F.nll_loss(z, y.flip(0), reduction="sum")


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_pytorch(name: str) -> None:
    loss, ignored = LOSSES[name]
    program = capture_as_eager(Head(loss), batch(ignored=ignored))
    if name == "two losses of one softmax":  # their gradients are added before they go through the softmax
        assert "aten._log_softmax.default" in calls(program)
        return
    assert not [call for call in calls(program) if "log_softmax" in call or "nll" in call]
    assert "paceline.cross_entropy_grad.default" in calls(program)


@pytest.mark.parametrize(
    ("loss", "classes"),
    [
        (F.cross_entropy, 8),
        (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), CLASSES),
        (lambda x, y: F.nll_loss(x.log_softmax(1) * 2, y), CLASSES),
        (lambda x, y: F.cross_entropy(x, y) + x.log_softmax(1).exp().sum(), CLASSES),
        (lambda x, y: F.cross_entropy(x.view(16, 18, -1).transpose(1, 2), y.view(16, 18)), CLASSES),
        (lambda x, y: F.cross_entropy(x, x.detach().softmax(1)), CLASSES),
    ],
)
def test_what_is_small_or_read_otherwise_is_left(loss: Callable[[Tensor, Tensor], Tensor], classes: int) -> None:
    capture_as_eager(Head(loss, classes), batch(classes))


def test_what_is_read_otherwise_and_not_through_the_same_softmax_is_rewritten_alone() -> None:
    program = capture(Head(lambda x, y: F.cross_entropy(x, y) + x.log_softmax(1).exp().sum()), batch())
    assert calls(program).count("aten._log_softmax.default") == 1
    assert calls(program).count("paceline.cross_entropy_grad.default") == 1


def test_evaluation_keeps_nothing_but_sums() -> None:
    program = capture(Head(F.cross_entropy).eval(), batch())
    assert "paceline.exponential_sums.default" in calls(program)
    assert not [node for node in program.graph.nodes if getattr(node.target, "__name__", "") == "exponentials.default"]


def test_beside_the_logits_their_exponentials_and_their_gradient_are_as_large() -> None:
    program = capture(Head(F.cross_entropy), batch())
    large = [
        str(node.target).split(".")[1]
        for node in program.graph.nodes
        if node.target is not operator.getitem
        for value in results(node)
        if value is not None and value.shape == (N, CLASSES)
    ]
    assert large == ["addmm", "exponentials", "cross_entropy_grad"]


@pytest.mark.parametrize(("shape", "dim"), [((700, 300), 1), ((3, 50, 7, 5), 1), ((40,), 0), ((6, 5, 40), -1)])
def test_operators_work_in_stretches(shape: tuple[int, ...], dim: int) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(shape, dtype=torch.float64) * 3 + 100, torch.randn(shape, dtype=torch.float64)
    x = x.transpose(0, -1).contiguous().transpose(0, -1)  # strides of their own
    largest = x.amax(dim, keepdim=True)
    made, total = ours.exponentials(x, largest, dim)
    assert_equal(ours.exponential_sums(x, largest, dim), total)
    assert_equal(made / total, x.softmax(dim))
    log = ours.log_softmax_apply(x, largest, total, dim)
    assert_equal(log, x.log_softmax(dim))
    for result, forward, backward in (
        (log, grad, aten._log_softmax_backward_data),
        (made / total, grad * (made / total), aten._softmax_backward_data),
    ):
        sums = forward.sum(dim, keepdim=True)
        want: Any = backward(grad, result, dim, x.dtype)
        assert_equal(ours.softmax_grad(grad, result, sums, dim, result is log), want)


def test_half_precision_is_summed_in_float32() -> None:
    x = torch.randn(64, 4096).bfloat16()
    largest = x.amax(1, keepdim=True)
    made, total = ours.exponentials(x, largest, 1)
    assert made.dtype == total.dtype == torch.float32
    want = x.double().log_softmax(1)
    log = ours.log_softmax_apply(x, largest, total, 1)
    assert log.dtype == torch.bfloat16
    torch.testing.assert_close(log.double(), want, rtol=2**-7, atol=0.0)


def assert_equal(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
