"""Tests of pipelines capture each module once for each shape: what they test comes after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils._pytree as pytree
from torch import nn

from paceline.program.capture import Batch, capture
from paceline.program.program import Program
from paceline.runtime import planning
from paceline.verify import run


@pytest.fixture(scope="session")
def captured() -> dict[Any, Program]:
    """What was captured so far, by what distinguishes the modules of these tests."""
    return {}


@pytest.fixture(scope="module", autouse=True)  # not longer: other tests have modules that look alike
def _captures_are_remembered(captured: dict[Any, Program]) -> Iterator[None]:
    def remembered(module: nn.Module, batch: Batch, **options: Any) -> Program:
        leaves, structure = pytree.tree_flatten(batch)
        tensors = [(tuple(leaf.shape), leaf.dtype) if hasattr(leaf, "shape") else leaf for leaf in leaves]
        named = [*module.named_parameters(), *module.named_buffers()]  # tied ones once
        held = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]
        modes = [part.training for part in module.modules()]
        key = repr((str(module), held, modes, str(structure), tensors, sorted(options.items())))
        if key not in captured:
            captured[key] = capture(module, batch, **options)
        return captured[key].copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "capture", remembered)
        patch.setattr(run, "capture", remembered)
        yield
