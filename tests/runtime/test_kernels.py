"""Quicker equals of operators: the same bits."""

import pytest
import torch

from paceline.runtime.kernels import embedding_dense_backward


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "padding", "scaled"), [(1, -1, False), (8, 0, False), (40, 3, False), (2, -1, True)])
def test_the_gradient_of_an_embedding(dtype: torch.dtype, width: int, padding: int, scaled: bool) -> None:
    random = torch.Generator().manual_seed(width)
    indices = torch.randint(0, 9, (6, 50), generator=random)
    gradient = torch.randn(6, 50, width, generator=random, dtype=torch.float64).to(dtype)
    found = embedding_dense_backward(gradient, indices, 11, padding, scaled)
    expected = torch.ops.aten.embedding_dense_backward(gradient, indices, 11, padding, scaled)
    assert found.dtype == dtype and torch.equal(found, expected)
