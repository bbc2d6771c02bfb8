"""What kernels of this machine take for themselves."""

from __future__ import annotations

import os

import pytest
import torch

from paceline.simulator.placed.workspace import MeasuredWorkspaces, NoWorkspaces

aten = torch.ops.aten
IMAGE, KERNEL = torch.zeros(2, 16, 8, 8), torch.zeros(16, 16, 3, 3)
CONVOLUTION = (IMAGE, KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def test_operators_that_work_in_what_they_return_need_nothing() -> None:
    assert MeasuredWorkspaces().bytes(aten.add.Tensor, (IMAGE, IMAGE), {}) == 0
    assert NoWorkspaces().bytes(aten.convolution.default, CONVOLUTION, {}) == 0


def test_results_are_no_workspace() -> None:
    taken = MeasuredWorkspaces().bytes(aten.convolution.default, CONVOLUTION, {})
    assert 0 <= taken < 64 * IMAGE.nbytes


def test_measuring_is_silent_and_leaves_the_standard_error_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    MeasuredWorkspaces().bytes(aten.convolution.default, CONVOLUTION, {})
    os.write(2, b"still heard\n")
    assert capfd.readouterr().err == "still heard\n"
