"""Attention in parts against the kernel that does it at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.placement.pieces import join, take
from paceline.placement.placements import PARTIAL, Shard
from paceline.program.attention import Span, attend, merge, spans
from paceline.program.fake import fake_mode

aten = torch.ops.aten
ours = torch.ops.paceline
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "groups", "rows", "columns", "blocks"),
    [(4, 4, 96, 96, 1), (4, 2, 96, 96, 4), (3, 1, 96, 96, 8), (2, 2, 96, 40, 4), (2, 1, 48, 96, (32, 16))],
)
def test_rows_of_all_ranks_are_those_of_the_kernel(
    dtype: torch.dtype, heads: int, groups: int, rows: int, columns: int, blocks: int | tuple[int, ...]
) -> None:
    q, k, v, grad = tensors(
        dtype, (2, heads, rows, 8), (2, groups, columns, 8), (2, groups, columns, 8), (2, heads, rows, 8)
    )
    want = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=0.4)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, *want, 0.0, True, scale=0.4)
    shard, parts = Shard(2, blocks), 2
    rest = parts, list(shard.sizes(rows)), 0.4
    found, back = [], []
    for rank in range(parts):
        mine, given = take(q, shard, parts, rank), take(grad, shard, parts, rank)
        found.append(ours.causal_rows(mine, k, v, torch.tensor(rank), *rest))
        back.append(ours.causal_rows_backward(given, mine, k, v, *found[-1], torch.tensor(rank), *rest))
    got = [join([rank[i] for rank in found], shard) for i in range(2)]
    got += [join([rank[i] for rank in back], where) for i, where in enumerate((shard, PARTIAL, PARTIAL))]
    for mine, theirs in zip(got, (*want, *grads), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shapes_types_and_strides_are_told_before(dtype: torch.dtype) -> None:
    q, k = tensors(dtype, (2, 4, 8, 4), (2, 2, 8, 4))
    pair = torch.cat([k, k], 3)
    mode = fake_mode()

    def run(q: Tensor, k: Tensor, pair: Tensor) -> Sequence[Tensor]:
        rest = torch.tensor(1), 2, [8, 8], None
        rows = ours.causal_rows(q, k, k, *rest)
        found = [*rows, *ours.causal_rows_backward(q, q, k, k, *rows, *rest)]
        for given in ((None, None), rows):
            turn = torch.tensor(1), 0, 2, [8, 8], True, None
            found += [*ours.ring_rows(q, pair, *given, *turn), *ours.ring_rows_backward(q, q, pair, *rows, *turn)]
        return found

    with mode:
        told = run(*map(mode.from_tensor, (q, k, pair)))
    for real, fake in zip(run(q, k, pair), told, strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_keys_in_two_sets_are_as_all_at_once() -> None:
    q, k, v = tensors(torch.float64, (2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 8))
    span = Span(0, 6, 7), Span(0, 6, 3)
    a = attend(q, k[:, :, :7], v[:, :, :7], span[0], None)
    b = attend(q, k[:, :, 7:], v[:, :, 7:], span[1], None)
    got, want = merge(a, b), attend(q, k, v, Span(0, 6, 10), None)
    assert got is not None and want is not None
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert attend(q, k, v, Span(0, 6, 0), None) is None and merge(None, a) is a and merge(a, None) is a


def test_every_pair_of_row_and_key_is_computed_once_and_no_other() -> None:
    for parts, blocks, columns in ((2, [24], 24), (3, [12, 12], 24), (2, [16, 8], 10), (4, [8] * 4, 40)):
        seen = sum(span.pairs for rank in range(parts) for span in spans(rank, parts, blocks, columns))
        assert seen == sum(min(row + 1, columns) for row in range(sum(blocks)))


def test_stripes_share_the_work() -> None:
    def most(blocks: int, parts: int = 2) -> float:
        sizes = [1024 // blocks] * blocks
        work = [sum(span.pairs for span in spans(rank, parts, sizes, 1024)) for rank in range(parts)]
        return max(work) / (sum(work) / parts)

    assert most(1) > 1.49 and most(1, 4) > 1.74
    assert most(8) < 1.07 and most(8, 4) < 1.1
