"""At least one call of every operator with a rule that the models of `captured` do not make."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.placement.drawn import Calls, bools, ints, rand
from tests.placement.oracle import Instance, instance
from tests.placement.shape_instances import creation, indexing, structural, windows

aten = torch.ops.aten
ours = torch.ops.paceline
NONE, MEAN, SUM = 0, 1, 2


def others() -> Iterator[Instance]:
    """Yield the calls, grouped as the rules are."""
    torch.manual_seed(1)
    for group in (
        _contractions,
        _pointwise,
        _reductions,
        _losses,
        _softmax_and_norms,
        _attention,
        _convolutions,
        windows,
        indexing,
        structural,
        creation,
    ):
        for target, *arguments in group():
            keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
            yield instance(target, *arguments, **keywords)


def _contractions() -> Calls:
    yield aten.mm.default, rand(4, 6), rand(6, 8)
    yield aten.bmm.default, rand(2, 4, 6), rand(2, 6, 8)
    yield aten.mv.default, rand(4, 6), rand(6)
    yield aten.dot.default, rand(6), rand(6)
    yield aten.vdot.default, rand(6), rand(6)
    for bias in ((8,), (4, 8), (1, 8), (4, 1), ()):
        yield aten.addmm.default, rand(*bias), rand(4, 6), rand(6, 8), {"beta": 0.5, "alpha": 2.0}
    for bias in ((8,), (2, 4, 8), (4, 1)):
        yield aten.baddbmm.default, rand(*bias), rand(2, 4, 6), rand(2, 6, 8)
    yield aten.addmv.default, rand(4), rand(4, 6), rand(6)


def _pointwise() -> Calls:
    x, y, mask = rand(4, 6), rand(4, 6), bools(4, 6)
    for target in (aten.add.Tensor, aten.sub.Tensor):
        yield target, x, y, {"alpha": 2}
        yield target, x, rand(1, 6)
        yield target, x, 3.0
    yield aten.mul.Tensor, x, y
    yield aten.mul.Tensor, rand(6), x
    yield aten.mul.Tensor, x, mask
    yield aten.mul.Scalar, x, 2
    yield aten.div.Tensor, x, y
    yield aten.div.Scalar, x, 2
    yield aten.neg.default, x
    yield ours.constrain.default, x, "tp=S0"
    yield aten.clone.default, x
    yield aten.where.self, mask, x, rand(6)
    yield aten.where.ScalarOther, mask, x, 0
    yield aten.where.ScalarOther, mask, x, 1.0
    yield aten.where.ScalarSelf, mask, 0.0, x
    yield aten.where.Scalar, mask, 0.0, 1.0
    yield aten.masked_fill.Scalar, x, mask, 0
    yield aten.masked_fill.Scalar, x, mask, -torch.inf
    yield aten.masked_fill.Tensor, x, mask, rand()
    yield aten.addcmul.default, x, y, rand(1, 6)
    yield aten.addcdiv.default, x, y, rand(1, 6)
    yield aten.lerp.Scalar, x, y, 0.3
    yield aten.copy.default, x, y
    yield aten.copy.default, x, rand(6)
    yield aten.fill.Scalar, x, 2.0
    yield aten.fill.Tensor, x, rand()
    yield aten.native_dropout_backward.default, x, mask, 1.25
    yield aten.threshold_backward.default, x, y, 0
    yield aten.gelu_backward.default, x, y
    for name in ("silu", "tanh", "sigmoid"):
        yield getattr(aten, f"{name}_backward").default, x, y
    for target in (aten._to_copy.default,):
        yield target, x, {"dtype": torch.float64}
        yield target, x, {"dtype": torch.int64}
        yield target, x, {"dtype": torch.bool}
        yield target, ints(9, 4, 6), {"dtype": torch.float64}
        yield target, mask, {"dtype": torch.float64}
    yield torch.ops.prims.convert_element_type.default, ints(9, 4, 6), torch.float64
    yield aten.lift_fresh_copy.default, x
    yield aten.softplus_backward.default, x, y, 1, 20
    yield aten.leaky_relu_backward.default, x, y, 0.1, False
    yield aten.hardtanh_backward.default, x, y, -1, 1
    yield aten.hardswish.default, x
    yield aten.hardswish_backward.default, x, y
    yield aten.hardsigmoid_backward.default, x, y
    yield aten.mish_backward.default, x, y
    yield aten.elu_backward.default, x, 1.0, 1.0, 1.0, False, y
    yield aten.log_sigmoid_forward.default, x
    yield aten.log_sigmoid_backward.default, x, y, aten.log_sigmoid_forward.default(y)[1]
    yield aten._prelu_kernel.default, x, rand(1, 6)
    yield aten._prelu_kernel_backward.default, x, y, rand(1, 6)


def _reductions() -> Calls:
    x = rand(4, 6, 8)
    for dim, keep in (([1], False), ([0, -1], True), ([], False), (None, False)):
        yield aten.sum.dim_IntList, x, dim, keep
    yield aten.sum.dim_IntList, bools(4, 6), [1]
    yield aten.sum.default, ints(9, 4, 6)
    yield aten.sum.default, rand()
    yield aten.histc.default, x, 5, -1, 1
    yield aten.histc.default, x, 5
    yield aten.count_nonzero.dim_IntList, bools(4, 6), [1]
    yield aten.count_nonzero.default, bools(4, 6)
    yield aten.mean.default, x
    yield aten.mean.dim, x, [1], True
    for target in (aten.amax.default, aten.amin.default):
        yield target, x, [1, 2]
        yield target, x
    yield aten.aminmax.default, x, {"dim": 1}
    for name in ("max", "min"):
        yield getattr(aten, name).default, x
        yield getattr(aten, name).dim, x, 1, True
        yield getattr(aten, f"arg{name}").default, x, 1
        yield getattr(aten, f"arg{name}").default, x
    for name in ("any", "all"):
        yield getattr(aten, name).default, bools(4, 6)
        yield getattr(aten, name).dim, bools(4, 6), 1
        yield getattr(aten, name).dims, bools(4, 6), [0, 1]
        yield getattr(aten, name).dims, bools(4, 6), []
    yield aten.prod.default, x
    yield aten.prod.dim_int, x, 1
    for name in ("var", "std", "var_mean"):
        yield getattr(aten, name).correction, x, [1], {"correction": 1, "keepdim": True}
        yield getattr(aten, name).correction, x
    for dims, keep in (([1], False), ([-1], True), ([0, 1], False)):
        yield aten.logsumexp.default, x, dims, keep
    yield aten.median.dim, x, 1
    yield aten.linalg_vector_norm.default, x, 2, [1]
    yield aten.linalg_vector_norm.default, x
    yield aten.norm.Scalar, x
    yield aten.norm.ScalarOpt_dim, x, 2, [1]
    for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        yield getattr(aten, name).default, x, -1
    yield aten.sort.default, x, 1
    yield aten.sort.stable, x, {"stable": True, "dim": 0}
    yield aten.topk.default, x, 2, 1
    yield aten.glu.default, x, 1
    yield aten.glu_backward.default, rand(4, 3, 8), x, 1


def _losses() -> Calls:
    x, y, weight = rand(4, 6), rand(4, 6).sigmoid(), torch.rand(6).double()
    target, image = ints(6, 4), ints(6, 4, 8, 2)
    target[1] = image[0, 1] = -100
    for reduction in (NONE, MEAN, SUM):
        for w in (None, weight):
            loss, total = aten.nll_loss_forward.default(x, target, w, reduction, -100)
            yield aten.nll_loss_forward.default, x, target, w, reduction, -100
            yield aten.nll_loss_backward.default, rand(*loss.shape), x, target, w, reduction, -100, total
            loss, total = aten.nll_loss2d_forward.default(rand(4, 6, 8, 2), image, w, reduction, -100)
            yield aten.nll_loss2d_forward.default, rand(4, 6, 8, 2), image, w, reduction, -100
            grad = rand(*loss.shape)
            yield aten.nll_loss2d_backward.default, grad, rand(4, 6, 8, 2), image, w, reduction, -100, total
        yield aten.nll_loss_forward.default, rand(6), ints(6), None, reduction, -100
        grad = rand(4, 6) if reduction == NONE else rand()
        p = x.sigmoid()
        yield aten.mse_loss.default, x, y, reduction
        yield aten.mse_loss.default, x, rand(1, 6), reduction
        yield aten.mse_loss_backward.default, grad, x, y, reduction
        yield aten.smooth_l1_loss.default, x, y, reduction
        yield aten.smooth_l1_loss_backward.default, grad, x, y, reduction, 1.0
        yield aten.huber_loss.default, x, y, reduction
        yield aten.huber_loss_backward.default, grad, x, y, reduction, 1.0
        yield aten.binary_cross_entropy.default, p, y, None, reduction
        yield aten.binary_cross_entropy.default, p, y, weight.expand(4, 6).contiguous(), reduction
        yield aten.binary_cross_entropy_backward.default, grad, p, y, None, reduction
        yield aten.soft_margin_loss.default, x, y, reduction
        yield aten.soft_margin_loss_backward.default, grad, x, y, reduction


def _softmax_and_norms() -> Calls:
    x = rand(4, 6, 8)
    for name in ("_softmax", "_log_softmax"):
        yield getattr(aten, name).default, x, 1, False
        result = getattr(aten, name).default(x, -1, False)
        yield getattr(aten, f"{name}_backward_data").default, rand(4, 6, 8), result, -1, torch.float64
    yield aten._safe_softmax.default, x, -1
    largest = x.amax(1, keepdim=True)
    made, total = ours.exponentials.default(x, largest, 1)
    yield ours.exponentials.default, x, largest, 1
    yield ours.exponential_sums.default, x, largest, 1
    yield ours.log_softmax_apply.default, x, largest, total, 1
    for log in (True, False):
        yield ours.softmax_grad.default, x, made, total, 1, log
    yield ours.cross_entropy_grad.default, rand(4, 6).exp(), rand(4), torch.tensor([0, -1, 5, 3]), rand(4)
    for shape in ([8], [6, 8]):
        weight, bias = rand(*shape), rand(*shape)
        for w in (None, weight):
            _, mean, rstd = aten.native_layer_norm.default(x, shape, w, bias, 1e-5)
            mask = [True, w is not None, True]
            yield aten.native_layer_norm.default, x, shape, w, bias, 1e-5
            yield aten.native_layer_norm_backward.default, rand(4, 6, 8), x, shape, mean, rstd, w, bias, mask
            yield aten._fused_rms_norm.default, x, shape, w, 1e-5
    weight, bias = rand(8), rand(8)
    for w, b in ((weight, bias), (None, None)):
        x = rand(4, 8, 6)
        _, mean, rstd = aten.native_group_norm.default(x, w, b, 4, 8, 6, 4, 1e-5)
        yield aten.native_group_norm.default, x, w, b, 4, 8, 6, 4, 1e-5
        mask = [True, w is not None, w is not None]
        yield aten.native_group_norm_backward.default, rand(4, 8, 6), x, mean, rstd, w, 4, 8, 6, 4, mask
    for shape in ((4, 8), (4, 8, 6, 2)):
        x, g = rand(*shape), rand(*shape)
        mean, variance = rand(8), rand(8).exp()
        rstd, sums = variance.rsqrt(), rand(2, 8)
        yield ours.batch_norm_sums.default, x, mean
        yield ours.batch_norm_statistics.default, sums + 100.0, mean, 48, 1e-5
        yield ours.batch_norm_grad_sums.default, g, x, mean, rstd
        for w, b in ((weight, bias), (None, None)):
            yield ours.batch_norm_apply.default, x, mean, rstd, w, b
            yield ours.batch_norm_input_grad.default, g, x, mean, rstd, w, sums, 48
            for training in (True, False):
                statistics = w, b, mean, variance, training, 0.1, 1e-5
                yield aten._native_batch_norm_legit_functional.default, x, *statistics
                mask = [True, w is not None, True]
                saved = (w, mean, variance, mean, rstd) if training else (w, mean, variance, None, None)
                yield aten.native_batch_norm_backward.default, g, x, *saved, training, 1e-5, mask
            yield aten._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, 1e-5
            yield aten._native_batch_norm_legit_no_training.default, x, w, b, mean, variance, 0.1, 1e-5


def _attention() -> Calls:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for groups, mask_shape, causal in (
        (4, None, True),
        (4, None, False),
        (4, (2, 4, 6, 8), False),
        (4, (2, 1, 6, 8), False),
        (4, (1, 1, 6, 8), False),
        (4, (6, 8), False),
        (2, None, False),
        (1, None, False),
        (2, (2, 4, 6, 8), False),
    ):
        columns = 6 if causal else 8
        q, k, v = rand(2, 4, 6, 4), rand(2, groups, columns, 4), rand(2, groups, columns, 4)
        options = {} if mask_shape is None else {"attn_mask": rand(*mask_shape)}
        yield forward, q, k, v, 0.0, causal, options
        out, rows = forward(q, k, v, 0.0, causal, **options)
        yield backward, rand(2, 4, 6, 4), q, k, v, out, rows, 0.0, causal, options
    for groups, blocks in ((4, [12]), (2, [6, 6])):  # rows of the rank 1 of 2
        q, k, v, where = rand(2, 4, 6, 4), rand(2, groups, 12, 4), rand(2, groups, 12, 4), torch.tensor(1)
        out, rows = ours.causal_rows.default(q, k, v, where, 2, blocks, 0.3)
        yield ours.causal_rows.default, q, k, v, where, 2, blocks, 0.3
        yield ours.causal_rows_backward.default, rand(2, 4, 6, 4), q, k, v, out, rows, where, 2, blocks, 0.3
        pair, turn = rand(2, groups, 6, 8), (where, 1, 2, blocks, True, 0.3)
        yield ours.ring_rows.default, q, pair, out, rows, *turn
        yield ours.ring_rows_backward.default, rand(2, 4, 6, 4), q, pair, out, rows, *turn


def _convolutions() -> Calls:
    for x, weight, stride, padding, transposed, groups in (
        ((4, 6, 8, 6), (4, 6, 3, 3), [1, 2], [1, 1], False, 1),
        ((4, 6, 8, 8), (4, 6, 1, 1), [1, 1], [0, 0], False, 1),  # every place by itself
        ((4, 6, 8, 8), (4, 6, 2, 2), [2, 2], [0, 0], False, 1),  # windows side by side
        ((4, 6, 8, 8), (4, 6, 2, 2), [2, 1], [0, 0], False, 1),
        ((4, 6, 8), (4, 6, 2), [2], [1], False, 1),
        ((4, 8, 8), (8, 1, 3), [1], [1], False, 8),  # depthwise
        ((4, 8, 8), (16, 2, 3), [1], [1], False, 4),
        ((4, 6, 8), (6, 4, 2), [2], [0], True, 1),
        ((4, 8, 8), (8, 4, 2), [2], [0], True, 4),
        ((2, 4, 4, 4, 4), (4, 4, 2, 2, 2), [2], [0], False, 1),
    ):
        places = len(x) - 2
        rest = stride, padding, [1] * places, transposed, [0] * places, groups
        inputs, kernel = rand(*x), rand(*weight)
        channels = weight[1] * groups if transposed else weight[0]
        yield aten.convolution.default, inputs, kernel, rand(channels), *rest
        out = aten.convolution.default(inputs, kernel, None, *rest)
        yield aten.convolution.default, inputs, kernel, None, *rest
        for sizes, mask in (([channels], [True, True, True]), ([0], [True, True, False]), (None, [False, True, False])):
            yield aten.convolution_backward.default, rand(*out.shape), inputs, kernel, sizes, *rest, mask
