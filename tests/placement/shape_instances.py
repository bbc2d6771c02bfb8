"""Calls of operators that move values: windows, indices, shapes; and of those that make tensors."""

from __future__ import annotations

import torch

from tests.placement.drawn import Calls, bools, ints, rand

aten = torch.ops.aten
ours = torch.ops.paceline


def windows() -> Calls:
    for x in (rand(4, 2, 6, 6), rand(2, 6, 6)):
        pool = [2, 2], [2, 2], [0, 0]
        grad = rand(*x.shape[:-2], 3, 3)
        wide = rand(*x.shape[:-2], 8, 8)
        yield aten.avg_pool2d.default, x, *pool
        yield aten.avg_pool2d_backward.default, grad, x, *pool, False, True, None
        yield aten._adaptive_avg_pool2d.default, x, [3, 3]
        yield aten._adaptive_avg_pool2d_backward.default, grad, x
        yield aten.max_pool2d_with_indices.default, x, *pool
        indices = aten.max_pool2d_with_indices.default(x, *pool)[1]
        yield aten.max_pool2d_with_indices_backward.default, grad, x, *pool, [1, 1], False, indices
        yield aten.adaptive_max_pool2d.default, x, [3, 3]
        yield aten.adaptive_max_pool2d_backward.default, grad, x, aten.adaptive_max_pool2d.default(x, [3, 3])[1]
        for name in ("reflection", "replication"):
            yield getattr(aten, f"{name}_pad2d").default, x, [1, 1, 1, 1]
            yield getattr(aten, f"{name}_pad2d_backward").default, wide, x, [1, 1, 1, 1]
    x, wide = rand(4, 2, 6, 6), rand(4, 2, 12, 12)
    for name in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
        yield getattr(aten, name).default, x, [12, 12], False
        yield getattr(aten, f"{name}_backward").default, wide, [12, 12], [4, 2, 6, 6], False
    line, cube = rand(4, 2, 6), rand(4, 2, 4, 4, 4)
    for kind in ("upsample_nearest", "_upsample_nearest_exact"):
        for x, more in ((line, [12]), (rand(4, 2, 6, 6), [12, 12]), (cube, [8, 8, 8])):
            yield getattr(aten, f"{kind}{len(more)}d").default, x, more
            yield getattr(aten, f"{kind}{len(more)}d_backward").default, rand(4, 2, *more), more, list(x.shape)
    for name, x, more in (("linear1d", line, [12]), ("trilinear3d", cube, [8, 8, 8])):
        yield getattr(aten, f"upsample_{name}").default, x, more, False
        yield getattr(aten, f"upsample_{name}_backward").default, rand(4, 2, *more), more, list(x.shape), False
    for name in ("reflection", "replication"):
        for x in (line, cube):
            amounts = [1, 1] * (x.ndim - 2)
            yield getattr(aten, f"{name}_pad{x.ndim - 2}d").default, x, amounts
            padded = rand(4, 2, *(n + 2 for n in x.shape[2:]))
            yield getattr(aten, f"{name}_pad{x.ndim - 2}d_backward").default, padded, x, amounts
    columns = [3, 3], [1, 1], [1, 1], [1, 1]
    yield aten.im2col.default, rand(4, 2, 6, 6), *columns
    yield aten.col2im.default, rand(4, 18, 36), [6, 6], *columns
    yield aten.pixel_shuffle.default, rand(4, 8, 6, 6), 2
    yield aten.pixel_unshuffle.default, rand(4, 2, 6, 12), 2
    pool, grad = ([2, 2, 2], [2, 2, 2], [0, 0, 0]), rand(4, 2, 2, 2, 2)
    yield aten.avg_pool3d.default, cube, *pool
    yield aten.avg_pool3d_backward.default, grad, cube, *pool, False, True, None
    yield aten._adaptive_avg_pool3d.default, cube, [2, 2, 2]
    yield aten._adaptive_avg_pool3d_backward.default, grad, cube
    yield aten.max_pool3d_with_indices.default, cube, *pool
    indices = aten.max_pool3d_with_indices.default(cube, *pool)[1]
    yield aten.max_pool3d_with_indices_backward.default, grad, cube, *pool, [1, 1, 1], False, indices


def indexing() -> Calls:
    table, ids = rand(10, 6), ints(10, 4, 8)
    yield aten.embedding.default, table, ids, 3
    for by_frequency in (False, True):
        yield aten.embedding_dense_backward.default, rand(4, 8, 6), ids, 10, 3, by_frequency
    yield ours.local_index.default, ints(12, 4, 8), torch.tensor(1), 4, 12, -1
    x = rand(4, 6, 8)
    for shape in ((4, 2, 8), (2, 6, 8), (4, 12, 8)):
        yield aten.gather.default, x, 1, ints(6, *shape)
    places = ints(6, 4, 6, 8).argsort(1)
    yield aten.scatter.value, x, 1, places, 2.0
    yield aten.scatter.src, x, 1, places, rand(4, 6, 8)
    yield aten.scatter_reduce.two, x, 1, ints(6, 4, 6, 8), rand(4, 6, 8), "amax"
    for shape, source in (
        ((4, 6, 8), (4, 6, 8)),
        ((4, 12, 8), (4, 12, 8)),
        ((2, 6, 8), (4, 6, 8)),
        ((4, 2, 8), (4, 4, 8)),
    ):
        yield aten.scatter_add.default, x, 1, ints(6, *shape), rand(*source)
    yield aten.scatter_add.default, rand(6), 0, ints(6, 8), rand(8)
    yield aten.index_select.default, x, 1, ints(6, 4)
    yield aten.index_add.default, x, 1, ints(6, 4), rand(4, 4, 8), {"alpha": 2}
    for indices, picked in (
        ([None, ints(6, 4)], (4, 4, 8)),
        ([ints(4, 6, 1), ints(6, 8)], (6, 8, 8)),
        ([ints(4, 2), None, ints(8, 2)], (2, 6)),
        ([None, ints(6, 4), ints(8, 4)], (4, 4)),
        ([None, None, ints(8, 4, 2)], (4, 6, 4, 2)),
        ([None, ints(6)], (4, 8)),
    ):
        yield aten.index.Tensor, x, indices
        yield aten._unsafe_index.Tensor, x, indices
        for values in (rand(*picked), rand(picked[-1]), rand()):
            yield aten.index_put.default, x, indices, values, True
            yield aten._unsafe_index_put.default, x, indices, values, True
    yield aten.index_put.default, x, [None, torch.tensor([0, 2, 3, 5])], rand(4, 4, 8), False
    yield aten.index_put.default, x, [bools(4, 6, 8)], rand(), False
    yield aten.index.Tensor, x, [None, torch.tensor([True, False, True, True, False, True])]


def structural() -> Calls:
    x = rand(4, 6, 8)
    yield aten.detach.default, x
    yield aten.alias.default, x
    for shape in ([24, 8], [4, 48], [4, 6, 2, 4], [2, 2, 48], [-1], [4, 1, 6, 8], [3, 64]):
        yield aten.view.default, x, shape
        yield aten.reshape.default, x, shape
    yield aten._unsafe_view.default, x, [24, 8]
    yield aten.unsqueeze.default, x, -1
    for shape in ((4, 1, 8), (2, 1, 8), (1, 2, 1)):
        yield aten.squeeze.default, rand(*shape)
        yield aten.squeeze.dim, rand(*shape), 1
        yield aten.squeeze.dim, rand(*shape), 0
        yield aten.squeeze.dims, rand(*shape), [0, 1]
    yield aten.permute.default, x, [2, 0, -2]
    yield aten.transpose.int, x, 0, -1
    yield aten.t.default, rand(4, 6)
    yield aten.t.default, rand(4)
    yield aten.select.int, x, 1, -1
    yield aten.select_backward.default, rand(4, 8), [4, 6, 8], 1, 2
    yield aten.unbind.int, x, 1
    for start, end, step in (
        (0, 2**63 - 1, 1),
        (-8, None, 1),
        (0, 4, 1),
        (4, 8, 1),
        (2, 6, 1),
        (1, 5, 1),
        (0, 8, 2),
        (3, 3, 1),
    ):
        yield aten.slice.Tensor, x, 2, start, end, step
        grad = rand(*aten.slice.Tensor(x, 2, start, end, step).shape)
        if end is not None:
            yield aten.slice_backward.default, grad, [4, 6, 8], 2, start, end, step
        yield aten.slice_scatter.default, x, grad, 2, start, end, step
    yield aten.select_scatter.default, x, rand(4, 8), 1, 2
    yield aten.split_with_sizes.default, rand(4, 18), [12, 6], 1
    yield aten.cat.default, [rand(4, 12), rand(4, 6)], 1
    yield aten.slice.Tensor, rand(4, 24), 1, 12, 18
    yield aten.split.Tensor, x, 4, 2
    yield aten.split.Tensor, x, 3, -1
    yield aten.split_with_sizes.default, x, [2, 2, 2], 1
    yield aten.split_with_sizes.default, x, [2, 4], 1
    yield aten.cat.default, [x, x, x], 1
    yield aten.cat.default, [x, rand(4, 2, 8)], 1
    yield aten.cat.default, [torch.empty(0).double(), x], -1
    yield aten.cat.default, [ints(5, 4, 2), ints(5, 4, 2)], -1
    yield aten.stack.default, [x, x], 1
    yield aten.stack.default, [rand(), rand()]
    yield aten.expand.default, rand(4, 1, 8), [4, 6, 8]
    yield aten.expand.default, rand(6, 1), [4, -1, 8]
    yield aten.expand.default, rand(), [4]
    yield aten.repeat.default, rand(4, 2), [2, 1, 3]
    yield aten.flip.default, x, [1]
    yield aten.roll.default, x, [1], [1]
    yield aten.roll.default, x, [1]
    yield aten.tril.default, x
    yield aten.triu.default, x, 1
    yield aten.constant_pad_nd.default, x, [1, 1]
    yield aten.constant_pad_nd.default, x, [0, 0, 1, -1], 0.0
    yield aten.constant_pad_nd.default, x, [1, 1], 2.0
    yield aten.unfold.default, x, 1, 2, 2
    yield aten.unfold_backward.default, rand(4, 3, 8, 2), [4, 6, 8], 1, 2, 2
    yield aten.view_as_complex.default, rand(4, 6, 2)
    yield aten.view_as_real.default, torch.complex(rand(4, 6), rand(4, 6))


def creation() -> Calls:
    x, size, double = rand(4, 6), [4, 6], {"dtype": torch.float64}
    for name in ("zeros", "ones"):
        yield getattr(aten, name).default, size, double
        yield getattr(aten, f"{name}_like").default, x
        yield getattr(aten, f"new_{name}").default, x, [4, 8]
    yield aten.full.default, size, 2.0
    yield aten.full_like.default, x, 2.0
    yield aten.new_full.default, x, [4, 8], 2.0
    yield aten.empty.memory_format, size
    yield aten.empty_like.default, x
    yield aten.new_empty.default, x, [4, 8]
    yield aten.empty_strided.default, size, [6, 1]
    yield aten.new_empty_strided.default, x, size, [6, 1]
    yield aten.arange.default, 4
    yield aten.arange.start, 2, 6
    yield aten.arange.start_step, 2, 10, 2
    yield aten.linspace.default, 0, 1, 4
    yield aten.eye.default, 4
    yield aten.eye.m, 4, 6
    yield aten.scalar_tensor.default, 2.0
    yield aten.tril_indices.default, 4, 4
    yield aten.triu_indices.default, 4, 4
    yield aten.rand.default, size
    yield aten.rand.generator, size, {"generator": None}
    yield aten.randn.default, size
    yield aten.randn.generator, size, {"generator": None}
    yield aten.randint.default, 9, size
    yield aten.randint.low, 2, 9, size
    yield aten.randperm.default, 4
    yield aten.rand_like.default, x
    yield aten.randn_like.default, x
    yield aten.randint_like.default, x, 9
    yield aten.randint_like.low_dtype, x, 2, 9
    yield aten.bernoulli.default, x.sigmoid()
    yield aten.bernoulli.p, x, 0.5
    yield aten.normal_functional.default, x
    yield aten.uniform.default, x
    yield aten.multinomial.default, x.sigmoid(), 2
    yield aten.exponential.default, x
    yield aten.rrelu_with_noise_functional.default, x, torch.zeros_like(x)
    yield aten.native_dropout.default, x, 0.5, True
