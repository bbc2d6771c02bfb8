"""With error feedback nothing is lost: what was sent, and what is left, is what was given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ExchangeError
from paceline.exchange.compress.feedback import Compression
from paceline.exchange.compress.names import decode, parse
from paceline.exchange.job import DenseTable, Job, SparseTable

_JOB = Job(
    (
        DenseTable("matrix", (192, 64), "float64"),
        SparseTable("rows", 6, "float64"),
        DenseTable("bias", (90,), "float64"),
    ),
    shards=3,
)
_ONE = Job((DenseTable("matrix", (64, 64), "float64"),), shards=1)
_DENSE = ["float16", "bfloat16", "int8", "one_bit", "top_k(0.05)", "sampled_top_k(0.05)", "power_sgd(2)"]


def _gradients(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", _DENSE)
def test_what_was_sent_and_is_left_is_what_was_given(name):
    compression = Compression.of(_ONE, name)
    given_, sent = torch.zeros(4096, dtype=torch.float64), torch.zeros(4096, dtype=torch.float64)
    for step in range(20):
        gradient = _gradients(step, 4096)
        made = compression.encode(0, 0, gradient)
        given_ += gradient
        sent += decode(compression.number(0), made, (4096,), torch.float64)
    last = compression.encode(0, 0, torch.zeros_like(given_))
    left = given_ - sent - decode(compression.number(0), last, (4096,), torch.float64)
    without = sum((_lost(name, _gradients(step, 4096)) for step in range(20)), torch.zeros_like(given_))
    assert left.norm() < 0.9 * without.norm()
    assert compression.figures.ratio > 1.9 and compression.figures.seconds > 0


def _lost(name, gradient):
    codec, matrix = parse(name), gradient.view(-1, 64)
    return (matrix - decode(codec.number, codec.encode(matrix), matrix.shape, gradient.dtype)).flatten()


@pytest.mark.parametrize("name", ["one_bit", "top_k(0.02)", "sampled_top_k(0.02)", "power_sgd(1)", "int8"])
def test_descent_arrives(name):
    """A quadratic: the gradient vanishes only where the minimum is."""
    compression = Compression.of(Job((DenseTable("x", (60, 50), "float64"),), shards=1), name)
    goal, x = _gradients(1, 3000), torch.zeros(3000, dtype=torch.float64)
    for _ in range(600):
        made = compression.encode(0, 0, x - goal)
        x -= 0.03 * decode(compression.number(0), made, (3000,), torch.float64)
    assert (x - goal).norm() < 0.02 * goal.norm()


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=10))
def test_rows_keep_what_is_left_by_key(seeds):
    compression = Compression.of(_JOB, "int8")
    balance: dict[int, torch.Tensor] = {}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randperm(12, generator=generator)[: 1 + seed % 9] * 10**15
        gradient = _gradients(seed, len(keys), 6) * 10.0 ** (torch.arange(len(keys))[:, None] % 5)
        back = decode(compression.number(1), compression.encode(1, 0, gradient, keys), gradient.shape, torch.float64)
        for key, row, sent in zip(keys.tolist(), gradient, back, strict=True):
            balance[key] = balance.get(key, torch.zeros(6, dtype=torch.float64)) + row - sent
    everything = torch.tensor(list(balance))
    rest = compression.encode(1, 0, torch.zeros(len(everything), 6, dtype=torch.float64), everything)
    most = max(float(x.abs().max()) for x in balance.values())
    expected = torch.stack(list(balance.values()))
    got = decode(compression.number(1), rest, expected.shape, torch.float64)
    torch.testing.assert_close(got, expected, rtol=0, atol=most / 127 + 1e-12)
    assert compression.memory_bytes > 0


def test_rows_go_as_they_are_where_a_codec_is_not_for_them():
    compression = Compression.of(_JOB, "top_k(0.1)")
    assert (compression.number(0), compression.number(1), compression.number(2)) == (5, 0, 5)
    assert Compression.of(_JOB, "bfloat16").number(1) == 2
    with pytest.raises(ExchangeError, match=r"cannot go as power_sgd\(2\)"):
        Compression(_JOB, parse("none"), parse("power_sgd(2)"))


@pytest.mark.parametrize("name", _DENSE)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_overflow_is_sent_once_and_then_forgotten(name, bad):
    compression = Compression.of(_ONE, name)
    gradient = _gradients(0, 4096)
    compression.encode(0, 0, gradient)
    broken = gradient.clone()
    broken[5] = bad
    made = compression.encode(0, 0, broken)
    assert not decode(compression.number(0), made, (4096,), torch.float64).isfinite().all()
    after = compression.encode(0, 0, gradient)
    assert decode(compression.number(0), after, (4096,), torch.float64).isfinite().all()


def test_two_workers_that_do_the_same_send_the_same():
    ours, theirs = (Compression.of(_ONE, "power_sgd(2)") for _ in range(2))
    for step in range(3):
        gradient = _gradients(step, 4096)
        assert all(map(torch.equal, ours.encode(0, 0, gradient), theirs.encode(0, 0, gradient)))
