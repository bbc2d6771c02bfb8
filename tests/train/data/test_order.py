"""The algebra of order and cutting, as properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PlanError
from paceline.train.data.order import Cut, Order, hold_out, hold_out_files, permutation


@given(st.integers(0, 500), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_permutation_holds_every_sample_once(length, seed, epoch):
    assert sorted(permutation(length, seed, epoch)) == list(range(length))


def test_permutation_is_fixed_forever():
    # These numbers are part of every checkpoint: a change of them breaks resuming.
    assert permutation(10, 0, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert permutation(10, 7, 3).tolist() == [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]


def test_permutation_depends_on_seed_and_on_epoch():
    orders = {tuple(permutation(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@given(st.integers(0, 1500), st.integers(1, 9), st.integers(0, 9), st.data())
def test_an_order_by_blocks_holds_every_sample_once_however_it_is_sliced(length, block, epoch, data):
    order = Order(length, 3, epoch, block)
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=5)))
    pieces = [order[a:b] for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    assert len(order) == length and np.array_equal(np.concatenate(pieces), order[:])
    assert sorted(order[:]) == list(range(length))


def test_an_order_by_blocks_stays_within_64_of_them_at_a_time():
    order = Order(100_000, 0, 0, 10)
    windows = [order[start : start + 640] for start in range(0, 99_000, 640)]
    assert {len(set(window // 10)) for window in windows} == {64}
    assert all((np.diff(window) != 1).mean() > 0.9 for window in windows)
    assert not np.array_equal(order[:640], Order(100_000, 0, 1, 10)[:640])
    assert order[99_999:].tolist() == [60148]  # fixed for ever, as those of `permutation` are


@given(st.integers(0, 640), st.sampled_from([None, 10]))
def test_what_fits_one_window_is_shuffled_as_a_whole(length, block):
    assert np.array_equal(Order(length, 5, 2, block)[:], permutation(length, 5, 2))
    assert np.array_equal(Order(length, 5, 2, block, shuffle=False)[:], np.arange(length))


@given(st.integers(1, 300), st.floats(0, 0.99))
def test_hold_out_divides_the_samples(length, fraction):
    train, validation = hold_out(length, fraction)
    assert sorted([*train, *validation]) == list(range(length))
    assert len(validation) == (0 if fraction == 0 else max(1, round(length * fraction)))


def test_hold_out_is_not_periodic():
    _, validation = hold_out(1000, 0.1)
    assert set(validation % 10) == set(range(10))


def test_one_file_in_twenty_is_held_out():
    assert np.flatnonzero(hold_out_files(100, 0.05)).tolist() == [19, 39, 59, 79, 99]
    assert not hold_out_files(100, 0.0).any()


@st.composite
def cuts(draw):
    ranks, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    share = draw(st.integers(1, 3))
    return Cut(draw(st.integers(1, 80)), ranks * micro_batches * share, micro_batches, ranks, draw(st.booleans()))


@given(cuts())
def test_parts_of_all_ranks_tile_the_epoch(cut):
    seen = []
    for step in range(cut.steps):
        parts = list(cut.parts(step))
        full = cut.length - step * cut.batch >= cut.batch
        assert len(parts) == cut.micro_batches or not full
        assert sum(part.whole for part in parts) <= (0 if full else 1)
        for part in parts:
            assert 0 < part.samples <= cut.batch // cut.micro_batches
            assert part.samples < cut.divisor if part.whole else part.samples % cut.divisor == 0
            slices = [part.of_rank(rank, cut.divisor) for rank in range(cut.divisor)]
            if part.whole:
                assert len(set((s.start, s.stop) for s in slices)) == 1
                seen.extend(range(slices[0].start, slices[0].stop))
            else:
                assert len(set(s.stop - s.start for s in slices)) == 1
                seen.extend(index for s in slices for index in range(s.start, s.stop))
    assert seen == list(range(cut.steps * cut.batch if cut.drop_last else cut.length))


def test_a_batch_that_cannot_be_divided_names_what_would_work():
    with pytest.raises(PlanError, match=r"Batch sizes that would work: 6 or 12, any multiple of 6.*: 1, 2, 5, 10\."):
        Cut(100, batch=10, micro_batches=3, divisor=2)
    with pytest.raises(
        PlanError, match=r"sizes that would work: 12 or 18.*micro-batches of 8, meshes .*: 1, 2, 4, 8\."
    ):
        Cut(100, batch=16, micro_batches=2, divisor=3)
    with pytest.raises(PlanError, match="Batch sizes that would work: 8, any"):
        Cut(100, batch=3, micro_batches=2, divisor=4)
    with pytest.raises(PlanError, match="micro_batches is 0"):
        Cut(100, batch=3, micro_batches=0, divisor=1)
