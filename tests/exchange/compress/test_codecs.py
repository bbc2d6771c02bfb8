"""Codecs: what comes back is as near as each promises, of any shape and type, and garbage is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.compress.codec import Codec, Slot
from paceline.exchange.compress.names import CODECS, KINDS, decode, parse

_NAMES = ["none", "float16", "bfloat16", "int8", "one_bit", "top_k(0.1)", "sampled_top_k(0.1)", "power_sgd(2)"]
codecs = pytest.mark.parametrize("codec", [parse(name) for name in _NAMES], ids=str)


def _values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _back(codec: Codec, values: Tensor, slot: Slot | None = None) -> Tensor:
    return decode(codec.number, codec.encode(values, slot), values.shape, values.dtype)


@codecs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1025,), (70_001,), (2000, 70), (3, 5, 7), (0,), (0, 4)], ids=str)
def test_what_comes_back_is_near(codec, dtype, shape):
    values = _values(*shape, dtype=dtype)
    given = values.clone()
    made = codec.encode(values)
    assert len(made) == codec.tensors and all(x.is_contiguous() for x in made)
    back = decode(codec.number, made, shape, dtype)
    assert back.shape == values.shape and back.dtype == dtype
    assert torch.equal(values, given)
    assert all(x.untyped_storage().data_ptr() != values.untyped_storage().data_ptr() for x in made if x.numel())
    if values.numel():
        assert (back - values).double().norm() <= values.double().norm()  # a contraction: error feedback converges
    left = values.clone()
    codec.take_off(left, made)
    torch.testing.assert_close(left, values - back, rtol=0, atol=0)
    assert all(torch.equal(x, y) for x, y in zip(made, codec.encode(values), strict=True))


def test_casts_are_of_their_precision():
    values = _values(1000)
    for name, error in (("float16", 2**-11), ("bfloat16", 2**-8)):
        assert ((_back(parse(name), values) - values).abs() <= error * values.abs() + 1e-7).all()


def test_float16_keeps_what_is_too_large_finite_and_what_is_infinite_not():
    values = torch.tensor([1e6, -1e6, 1.0, torch.inf, -torch.inf, torch.nan])
    assert _back(parse("float16"), values).tolist()[:5] == [65504, -65504, 1, torch.inf, -torch.inf]
    assert _back(parse("float16"), values)[5].isnan()


def test_int8_errs_by_half_a_step_of_its_block():
    values = _values(1000) * torch.logspace(-3, 3, 1000)
    steps = torch.nn.functional.pad(values, (0, 24)).view(8, 128).abs().amax(1, keepdim=True) / 127
    error = (_back(parse("int8"), values) - values).abs()
    assert (torch.nn.functional.pad(error, (0, 24)).view(8, 128) <= 0.5001 * steps).all()


@pytest.mark.parametrize("name", ["int8", "bfloat16", "float16"])
def test_what_is_not_finite_is_seen(name):
    values = _values(500)
    values[77] = torch.nan
    assert not _back(parse(name), values)[77].isfinite()
    values[77] = torch.inf
    assert not _back(parse(name), values)[77].isfinite()


def test_one_bit_keeps_signs_and_means():
    values = _values(3000)
    back = _back(parse("one_bit"), values)
    assert torch.equal(back > 0, values >= 0)
    torch.testing.assert_close(back[:1024].abs(), values[:1024].abs().mean().expand(1024))
    torch.testing.assert_close(back[2048:].abs(), values[2048:].abs().mean().expand(952))


def test_top_k_has_the_largest():
    values = _values(2000)
    back = _back(parse("top_k(0.05)"), values)
    kept = back != 0
    assert kept.sum() == 100 and torch.equal(back[kept], values[kept])
    assert values[kept].abs().min() >= values[~kept].abs().max()


def test_sampled_top_k_has_nearly_the_largest():
    values = _values(1_000_000)
    back = _back(parse("sampled_top_k(0.01)"), values)
    kept = back != 0
    assert 7_000 < kept.sum() <= 20_000 and torch.equal(back[kept], values[kept])
    assert values[kept].abs().min() >= values[~kept].abs().max()


@pytest.mark.parametrize("codec", [parse("top_k(0.01)"), parse("sampled_top_k(0.01)")], ids=str)
def test_zeros_and_ties(codec):
    zeros = torch.zeros(100_000)
    assert torch.equal(_back(codec, zeros), zeros)
    ones = torch.ones(100_000)
    assert 1000 <= _back(codec, ones).sum() <= 2000


def test_power_sgd_finds_a_matrix_of_its_rank():
    matrix = _values(200, 2) @ _values(2, 50, seed=1)
    codec = parse("power_sgd(2)")
    made = codec.encode(matrix)
    assert sum(x.numel() for x in made) == 2 * 250 + 1
    torch.testing.assert_close(_back(codec, matrix), matrix, rtol=1e-4, atol=1e-4)


def test_power_sgd_goes_on_from_where_it_was():
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(100, 100, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator))
    sizes = 0.95 ** torch.arange(60)
    matrix = (left[:, :60] * sizes) @ right
    best = float(sizes[4:].norm())
    slot = Slot.of(matrix)
    errors = [float((_back(parse("power_sgd(4)"), matrix, slot) - matrix).norm()) for _ in range(30)]
    assert errors[-1] < errors[0] and errors[-1] < 1.01 * best


def test_power_sgd_of_a_slice_of_a_matrix_is_of_its_rows():
    matrix = _values(200, 1) @ _values(1, 50, seed=1)
    part = matrix.flatten()[1037:7777]
    codec = parse("power_sgd(3)")  # one for the matrix, two for rows of which a part is here
    torch.testing.assert_close(_back(codec, part, Slot(50, 1037 % 50)), part, rtol=1e-4, atol=1e-4)
    assert len(codec.encode(part, Slot(50, 1037 % 50))[1]) == 50


def test_power_sgd_decodes_the_product():
    left, right = _values(3000, 3), _values(64, 3, seed=1)
    whole = (left.double() @ right.T.double()).flatten()
    back = decode(7, (left, right, torch.tensor([37])), (3000 * 64 - 37 - 5,), torch.float64)
    torch.testing.assert_close(back, whole[37:-5], rtol=1e-5, atol=1e-5)
    off = torch.zeros_like(back)
    parse("power_sgd(3)").take_off(off, (left, right, torch.tensor([37])))
    assert torch.equal(off, -back)


def test_power_sgd_survives_zeros_and_overflows():
    slot = Slot.of(_values(40, 30))
    codec = parse("power_sgd(1)")
    assert not _back(codec, torch.zeros(40, 30), slot).any()
    assert not _back(codec, torch.full((40, 30), torch.inf), slot).isfinite().any()
    matrix = _values(40, 1) @ _values(1, 30, seed=1)
    torch.testing.assert_close(_back(codec, matrix, slot), matrix, rtol=1e-4, atol=1e-4)


@codecs
def test_what_does_not_fit_is_refused(codec):
    made = codec.encode(_values(300, 40))
    for wrong in ((), made + made[:1], made[:-1], (made[0].bool(), *made[1:]), (made[0][None], *made[1:])):
        with pytest.raises(ExchangeError, match=r"does not fit|tensors came as"):
            decode(codec.number, wrong, (300, 40), torch.float32)
    with pytest.raises(ExchangeError, match="does not fit"):
        decode(codec.number, made, (299, 38), torch.float32)


def test_places_beyond_the_end_are_refused():
    for places in ([5], [-1], [2, 2], [3, 1]):
        made = (torch.tensor(places, dtype=torch.int32), torch.ones(len(places)))
        with pytest.raises(ExchangeError, match="does not fit"):
            decode(5, made, (5,), torch.float32)


def test_names():
    assert [codec.number for codec in KINDS] == list(range(8))
    assert [str(parse(f" {name} ")) for name in _NAMES] == _NAMES
    assert str(parse("top_k")) == "top_k(0.01)"
    assert all(kind.summary for kind in CODECS.values())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topk(0.1)", "unknown compression 'topk.0.1.'.*Did you mean 'top_k'"),
        ("int8(4)", "int8 takes no number"),
        ("top_k(x)", r"such as top_k\(0.01\)"),
        ("top_k(0)", "above 0"),
        ("power_sgd(0)", "whole number from 1"),
        ("power_sgd(1.5)", r"such as power_sgd\(2\)"),
        ("", "unknown compression"),
    ],
)
def test_what_cannot_be_read_is_explained(text, words):
    with pytest.raises(ExchangeError, match=words):
        parse(text)


def test_an_unknown_number_is_explained():
    with pytest.raises(ExchangeError, match="no codec 99; known: 0 none, 1 float16"):
        decode(99, (), (1,), torch.float32)
