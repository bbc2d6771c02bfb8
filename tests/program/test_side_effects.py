from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from paceline.program.capture import capture
from paceline.program.program import OutputRole
from tests.program.stepping import capture_as_eager

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)


class Assigns(Base):
    """Assigns to buffers instead of changing them in place, as moving averages often do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("flag", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * y.mean(0)
        self.flag = ~self.flag
        return (y - self.average).square().mean()


def test_assigned_buffers_are_outputs() -> None:
    program = capture_as_eager(Assigns(), (X,))
    changed = [item.name for item in program.outputs if item.role is OutputRole.BUFFER]
    assert changed == ["average", "flag"]


class Caches(Base):
    """Makes its table in the first forward pass and keeps it, as an attribute and as a buffer that began as None."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(3, dtype=x.dtype)
            self.mask = self.table > 0
            self.sizes = x.shape
        return (self.linear(x) * self.table * self.mask).square().mean()


def test_what_a_forward_pass_keeps_for_itself_is_put_back() -> None:
    module = Caches()
    capture_as_eager(module, (X,))
    assert module.table is None and module.mask is None and not hasattr(module, "sizes")
    capture_as_eager(module, (X[:2],))
    assert not any(isinstance(value, FakeTensor) for value in vars(module).values())


class Records(Base):
    """Registers a hook in its first forward pass, which gets at what a part returns."""

    hooked = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen: list[Tensor] = []
        if not self.hooked:
            self.linear.register_forward_hook(lambda _module, _args, result: self.seen.append(result))
            self.hooked = True
        self.linear(x)
        assert len(self.seen) == 1
        return self.seen[0].square().mean()


def test_hooks_that_a_forward_pass_registers_are_removed() -> None:
    module = Records()
    program = capture(module, (X,))
    assert not module.linear._forward_hooks
    assert not module.hooked and program.training


class Counts(Base):
    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).mean() * self.calls


def test_a_counter_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    module = Counts()
    with caplog.at_level(logging.WARNING, "paceline"):
        capture_as_eager(module, (X,))
    assert "the forward pass sets calls from 0 to 1" in caplog.text
    assert module.calls == 0


def test_modules_that_only_read_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).mean()

    with caplog.at_level(logging.WARNING, "paceline"):
        capture(Model(), (X,))
    assert not caplog.records
