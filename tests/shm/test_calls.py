"""The tests' own tools: that they draw every call, lay tensors out as they say, and see what is wrong."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed import ReduceOp

from tests.shm.calls import AllReduce, Call, Place, Running, differences
from tests.shm.program import ANYTHING, draw
from tests.shm.values import DTYPES, FLOATS, Layout, Spec, Want, lay, reduced


def _kinds(kind: type) -> set[type]:
    return {kind}.union(*(_kinds(one) for one in kind.__subclasses__()))


def test_every_call_is_drawn_on_every_type():
    calls = [step.call for seed in range(40) for batch in draw(seed, 3, ANYTHING).batches for step in batch]
    assert {type(call) for call in calls} == _kinds(Call) - {Call}
    assert {call.spec.dtype for call in calls if isinstance(call, AllReduce)} == set(DTYPES)
    assert sum(math.prod(getattr(call, "spec", Spec((), torch.bool, 0)).shape) > 1_000_000 for call in calls) > 3


def test_a_seed_says_everything():
    assert draw(3, 3, ANYTHING) == draw(3, 3, ANYTHING) != draw(4, 3, ANYTHING)
    spec = Spec((3, 4), torch.float16, seed=5)
    assert Want(spec.values(1, 2)).difference(spec.values(1, 2)) is None
    assert Want(spec.values(1, 2)).difference(spec.values(2, 1)) is not None


@pytest.mark.parametrize("layout", Layout)
def test_layouts_hold_any_bits(layout):
    for dtype, shape in itertools.product(DTYPES, [(), (1,), (0, 3), (5,), (4, 3), (2, 3, 4)]):
        values = Spec(shape, dtype, seed=1).values(0)
        laid = lay(values, layout, lambda count, dtype: torch.empty(count, dtype=dtype))
        assert Want(values).difference(laid) is None
    assert laid.is_contiguous() is (layout not in (Layout.STEPPED, Layout.TRANSPOSED))
    assert (laid.storage_offset() > 0) is (layout in (Layout.SHIFTED, Layout.SHARED_SHIFTED))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_may_round_but_not_be_wrong(dtype):
    spec = Spec((2000,), dtype, seed=1, bits=False)
    terms = [spec.values(rank) for rank in range(4)]
    want = reduced(ReduceOp.SUM, terms)
    for order in itertools.permutations(terms):
        total = order[0]
        for term in order[1:]:
            total = total + term
        assert want.difference(total) is None
        assert want.difference(total - order[0]) is not None
    assert want.difference(sum(term.double() for term in terms).to(dtype)) is None
    assert want.difference(torch.where(torch.arange(2000) == 1999, want.value * 1.01 + 0.1, want.value)) is not None


def test_two_terms_are_exact():
    a, b = torch.tensor([0.1, 2.0]), torch.tensor([0.2, 3.0])
    assert reduced(ReduceOp.SUM, [a, b]).difference(a + b) is None
    assert reduced(ReduceOp.SUM, [a, b]).difference(torch.nextafter(a + b, a)) is not None


def test_bits_are_compared_as_bits():
    assert Want(torch.tensor([0.0])).difference(torch.tensor([-0.0])) is not None
    assert Want(torch.tensor([math.nan])).difference(torch.tensor([math.nan])) is None
    assert Want(torch.tensor([True])).difference(torch.tensor([2], dtype=torch.uint8).view(torch.bool)) is not None


def test_an_input_that_was_written_to_is_seen():
    spec = Spec((3,), torch.float32, seed=1, bits=False)
    held, place = torch.ones(3), Place(None, 0, 1)
    call, right = AllReduce(spec, ReduceOp.SUM), spec.values(0)
    assert not differences(call, place, Running([right], [], [(held, held.clone())]))
    assert differences(call, place, Running([right], [], [(held, held + 1)]))
    assert differences(call, place, Running([right + 1]))
