from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import CaptureError
from paceline.program.capture import capture

HERE = Path(__file__)


def line_of(marker: str) -> int:
    """Number of the line of this file that ends with a marker."""
    return next(i for i, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {marker}"))


class Model(nn.Module):
    def __init__(self, forward: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def branches(model: Model, x: Tensor) -> Tensor:
    y = model.linear(x)
    if y.sum() > 0:  # branch
        y = -y
    return y.mean()


def reads(model: Model, x: Tensor) -> Tensor:
    scale = model.linear(x).max().item()  # item
    return model.linear(x).mean() * scale


def lists(model: Model, x: Tensor) -> Tensor:
    kept = [row for row in model.linear(x) if row.sum().tolist() > 0]  # tolist
    return torch.stack(kept).mean()


def selects(model: Model, x: Tensor) -> Tensor:
    y = model.linear(x)
    return y[y > 0].mean()  # mask


def fails(model: Model, x: Tensor) -> Tensor:
    return model.linear(x.view(-1, 5)).mean()  # shape


@pytest.mark.parametrize(
    ("forward", "marker"),
    [(branches, "branch"), (reads, "item"), (lists, "tolist"), (selects, "mask"), (fails, "shape")],
)
def test_the_error_shows_the_users_own_line_and_a_way_out(forward: Any, marker: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Model(forward), (torch.ones(2, 4),))
    text = str(caught.value)
    assert f"{HERE}:{line_of(marker)}, in " in text
    assert "fallback='ddp'" in text


def refused(forward: Any, message: str, batch: Any = None) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Model(forward), (torch.ones(2, 4),) if batch is None else batch)


@pytest.mark.parametrize(
    ("result", "given"),
    [
        (lambda m, x: m.linear(x), re.escape("a tensor of shape (2, 3), torch.float32")),
        (lambda m, x: m.linear(x).sum().long(), re.escape("a tensor of shape (), torch.int64")),
        (lambda m, x: (m.linear(x).mean(), x), "tuple"),
        (lambda m, x: {"logits": m.linear(x)}, "dict"),
        (lambda m, x: None, "NoneType"),
        (lambda m, x: 3.0, "float"),
    ],
)
def test_a_result_that_is_no_loss(result: Any, given: str) -> None:
    refused(result, f"the module returned {given}; its call must return a scalar")


def test_a_loss_that_no_parameter_decides() -> None:
    refused(lambda m, x: x.mean(), "does not depend on any parameter")
    model = Model(lambda m, x: m.linear(x).mean()).requires_grad_(False)
    with pytest.raises(CaptureError, match=re.escape("module.requires_grad_(True)")):
        capture(model, (torch.ones(2, 4),))
    assert not capture(model.eval(), (torch.ones(2, 4),)).training


def test_a_batch_changed_in_place() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return m.linear(x).mean()

    refused(forward, "changes its batch in place; clone")


def test_a_parameter_changed_in_place() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.linear.weight.clamp_(-1, 1)
        return m.linear(x).mean()

    refused(forward, "changes the parameter 'linear.weight' in place")


def test_a_buffer_that_is_given_another_shape() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        m.history = torch.cat([m.history, x])
        return m.linear(m.history).mean()

    model = Model(forward)
    model.register_buffer("history", torch.zeros(1, 4))
    with pytest.raises(CaptureError, match="buffer 'history'"):
        capture(model, (torch.ones(2, 4),))
    assert model.history.shape == (1, 4)
    assert not isinstance(model.history, torch._subclasses.FakeTensor)


def test_a_parameter_that_is_not_registered() -> None:
    hidden = [nn.Parameter(torch.ones(4, 3))]
    refused(lambda m, x: (m.linear(x) + x @ hidden[0]).mean(), "would not be trained. Register it")


def test_a_tensor_changed_in_place_that_is_not_registered() -> None:
    counts = torch.zeros(3)

    def forward(m: Model, x: Tensor) -> Tensor:
        counts.add_(1.0)
        return (m.linear(x) * counts).mean()

    refused(forward, "Register it with register_buffer")
