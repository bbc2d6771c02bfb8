"""What is sent between stages arrives as it was, or rounded as the plan says and no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.runtime.pipeline.step import Sent
from paceline.runtime.pipeline.wire import wire_named


def through(name: str, x: Tensor) -> Tensor:
    """Encode and decode, and check that what travels is what the receiver makes room for."""
    wire, sent = wire_named(name), Sent(tuple(x.shape), x.dtype)
    parts = wire.encode(x)
    assert [Sent(tuple(part.shape), part.dtype) for part in parts] == wire.layout(sent)
    assert all(part.is_contiguous() for part in parts)
    found = wire.decode(parts, sent)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    return found


UNROUNDED = [
    torch.arange(-300, 300),
    torch.tensor([True, False]),
    torch.tensor(1 / 3, dtype=torch.float64),
    torch.tensor([[1 / 3]]),
    torch.randn(40).bfloat16(),
    torch.randn(40).half(),
    torch.zeros(0, 5, dtype=torch.float64),
    torch.get_rng_state(),
]


@pytest.mark.parametrize("name", ["exact", "bfloat16", "int8"])
@pytest.mark.parametrize("x", UNROUNDED, ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_what_is_no_wide_tensor_arrives_as_it_was(name: str, x: Tensor) -> None:
    assert torch.equal(through(name, x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_bounded(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 29, generator=generator, dtype=dtype) * 10.0 ** torch.arange(-14, 15)  # 1073 values: no block
    x = x.t()  # not contiguous
    assert torch.equal(through("exact", x), x)
    assert ((through("bfloat16", x) - x).abs() <= x.abs() / 256).all()
    flat, found = x.reshape(-1), through("int8", x).reshape(-1)
    for block, near in zip(flat.split(256), found.split(256), strict=True):
        assert (near - block).abs().max() <= block.abs().max() / 127 * 0.501


def test_bytes_are_a_half_and_a_quarter() -> None:
    x = torch.randn(64, 64)
    sizes = {name: sum(p.nbytes for p in wire_named(name).encode(x)) for name in ("exact", "bfloat16", "int8")}
    assert sizes == {"exact": 4 * 4096, "bfloat16": 2 * 4096, "int8": 4096 + 4096 // 256 * 4}


@pytest.mark.parametrize("name", ["exact", "bfloat16", "int8"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(name: str, wrong: float) -> None:
    x = torch.ones(600)
    x[300] = wrong
    found = through(name, x)
    assert not found[300].isfinite()
    assert found[:256].isfinite().all() and found[512:].isfinite().all()


@pytest.mark.parametrize("name", ["exact", "bfloat16", "int8"])
def test_zeros_and_the_smallest_numbers_do_not_become_nan(name: str) -> None:
    for x in (torch.zeros(5), torch.full((5,), 1e-45), torch.full((5,), 3e38)):
        assert through(name, x).isfinite().all()
