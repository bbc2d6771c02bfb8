from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.program.program import OutputRole
from tests.program.stepping import capture_as_eager, run_program

CLASSES = 5
IGNORED = torch.tensor([[0, -100, 2, 3], [4, -100, -100, 1], [2, 2, 0, -100]])
WHOLE = torch.arange(12).view(3, 4) % CLASSES
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.25], dtype=torch.float64)
X = torch.linspace(-1, 1, 36, dtype=torch.float64).view(3, 4, 3)


class Classifier(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, CLASSES, dtype=torch.float64)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.linear(x), y)


def tokens(loss: Any, **options: Any) -> Any:
    return lambda logits, y: loss(logits.flatten(0, 1), y.flatten(), **options)


def values(logits: Tensor) -> Tensor:
    return logits[..., 0]


KNOWN: dict[str, tuple[Any, Tensor, float]] = {
    "cross entropy": (tokens(F.cross_entropy), WHOLE, 12),
    "ignored": (tokens(F.cross_entropy), IGNORED, 8),
    "another ignored index": (tokens(F.cross_entropy, ignore_index=2), WHOLE, 10),
    "class weights": (tokens(F.cross_entropy, weight=WEIGHTS), WHOLE, float(WEIGHTS[WHOLE].sum())),
    "class weights, ignored": (
        tokens(F.cross_entropy, weight=WEIGHTS),
        IGNORED,
        float(WEIGHTS[IGNORED[IGNORED >= 0]].sum()),
    ),
    "label smoothing": (tokens(F.cross_entropy, label_smoothing=0.1), WHOLE, 12),
    "label smoothing, ignored": (tokens(F.cross_entropy, label_smoothing=0.1), IGNORED, 8),
    "label smoothing, class weights, ignored": (
        tokens(F.cross_entropy, weight=WEIGHTS, label_smoothing=0.1),
        IGNORED,
        float(WEIGHTS[IGNORED[IGNORED >= 0]].sum()),
    ),
    "images": (lambda z, y: F.cross_entropy(z.movedim(-1, 1)[..., None], y[..., None]), IGNORED, 8),
    "nll": (lambda z, y: F.nll_loss(z.flatten(0, 1).log_softmax(-1), y.flatten()), IGNORED, 8),
    "sum over count": (
        lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") / (y != -100).sum(),
        IGNORED,
        8,
    ),
    "own mask": (
        lambda z, y: (values(z).square() * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1),
        IGNORED,
        8,
    ),
    "a multiple": (lambda z, y: 0.5 * F.mse_loss(values(z), y.double()) / 3.0, WHOLE, 12),
    "a difference": (lambda z, y: F.mse_loss(values(z), y.double()) - values(z).tanh().mean(), WHOLE, 12),
    "mse": (lambda z, y: F.mse_loss(values(z), y.double()), WHOLE, 12),
    "l1": (lambda z, y: F.l1_loss(values(z), y.double()), WHOLE, 12),
    "smooth l1": (lambda z, y: F.smooth_l1_loss(values(z), y.double()), WHOLE, 12),
    "bce with logits": (lambda z, y: F.binary_cross_entropy_with_logits(values(z), (y % 2).double()), WHOLE, 12),
    "mean": (lambda z, y: z.square().mean(), WHOLE, 60),
    "mean over dimensions": (lambda z, y: z.square().mean((0, 1, 2)), WHOLE, 60),
    "mean of means": (lambda z, y: z.square().mean((1, 2)).mean(), WHOLE, 3),
    "float32 loss": (lambda z, y: F.cross_entropy(z.flatten(0, 1).float(), y.flatten()).double(), IGNORED, 8),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_weight_is_what_the_sum_was_divided_by(name: str) -> None:
    """So weighted gradients of parts add up to those of the whole."""
    loss, labels, weight = KNOWN[name]
    torch.manual_seed(0)
    module = Classifier(loss)
    lower = name == "float32 loss"
    program = capture_as_eager(module, (X, labels), tolerance=1e-6 if lower else 1e-12)
    whole = run_program(program, module, (X, labels))
    assert whole.weight == pytest.approx(weight, rel=1e-12)
    total, summed, tolerance = 0.0, torch.zeros(CLASSES, 3, dtype=torch.float64), 1e-5 if lower else 1e-12
    for part in (slice(0, 1), slice(1, 3)):
        batch = (X[part], labels[part])
        found = run_program(capture_as_eager(module, batch, tolerance=tolerance), module, batch)
        assert found.weight is not None
        summed += found.gradients["linear.weight"] * found.weight
        total += found.weight
    torch.testing.assert_close(summed / total, whole.gradients["linear.weight"], rtol=tolerance, atol=tolerance)


UNKNOWN: dict[str, Any] = {
    "sum": tokens(F.cross_entropy, reduction="sum"),
    "two counts": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()) + z.square().mean(),
    "own mean": lambda z, y: z.square().sum() / 7.0,
    "count of predictions": lambda z, y: z.square().sum() / (z > 0).sum(),
    "root": lambda z, y: z.square().mean().sqrt(),
    "product": lambda z, y: z.square().mean() * z.mean(),
    "reciprocal": lambda z, y: 1.0 / z.square().mean(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_guessed(name: str) -> None:
    program = capture_as_eager(Classifier(UNKNOWN[name]), (X, WHOLE))
    assert program.weight is None
    assert OutputRole.WEIGHT not in [item.role for item in program.outputs]


def test_a_term_that_no_batch_decides_has_no_say() -> None:
    class Regularised(Classifier):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            decay = self.linear.weight.square().sum() * 0.1 + self.linear.bias.abs().mean()
            return super().forward(x, y) * self.linear.bias.exp().sum() + decay

    module = Regularised(tokens(F.cross_entropy))
    program = capture_as_eager(module, (X, IGNORED))
    assert run_program(program, module, (X, IGNORED)).weight == 8


def test_hugging_face_losses_have_a_weight() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = torch.arange(24).view(3, 8) % 64
    labels = torch.where(ids % 3 == 0, -100, ids)
    llama = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(intermediate_size=24, **sizes))
    bert = transformers.AutoModelForMaskedLM.from_config(
        transformers.BertConfig(intermediate_size=24, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes)
    )
    for model, valid in ((llama, (labels[:, 1:] >= 0).sum()), (bert, (labels >= 0).sum())):
        batch = {"input_ids": ids, "labels": labels}
        program = capture_as_eager(model.train(), batch, tolerance=1e-4)
        assert run_program(program, model, batch).weight == valid
