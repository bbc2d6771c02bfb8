import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.placement.boxes import Box
from paceline.train.checkpoint.cover import flaw


@st.composite
def shapes(draw):
    return tuple(draw(st.lists(st.integers(0, 6), max_size=3)))


@st.composite
def grids(draw, shape):
    """A cover of a tensor by cutting each dimension at any places, empty pieces included."""
    cuts = [sorted([0, n, *draw(st.lists(st.integers(0, n), max_size=3))]) for n in shape]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)]


def indices(box):
    return set(itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))


@settings(max_examples=150)
@given(st.data())
def test_any_layout_is_put_together_from_any_other(data):
    shape = data.draw(shapes())
    saved, wanted = data.draw(grids(shape)), data.draw(grids(shape))
    assert flaw(saved, shape) is None
    for target in wanted:
        shared = [box.intersect(target) for box in saved]
        found = [index for box in shared if box for index in indices(box)]
        assert sorted(found) == sorted(indices(target))  # each element once


@settings(max_examples=150)
@given(st.data())
def test_intersection_is_the_set_of_shared_elements(data):
    shape = data.draw(shapes())
    a, b = (data.draw(st.sampled_from(data.draw(grids(shape)))) for _ in range(2))
    shared = a.intersect(b)
    assert (indices(shared) if shared else set()) == indices(a) & indices(b)
    if shared:
        assert indices(shared.inside(a)) == {
            tuple(at - start for at, start in zip(index, a.offset, strict=True)) for index in indices(shared)
        }


@settings(max_examples=100)
@given(st.data())
def test_a_lost_or_doubled_piece_is_found(data):
    shape = data.draw(shapes().filter(lambda s: all(s)))
    boxes = data.draw(grids(shape))
    filled = [box for box in boxes if box.size]
    victim = data.draw(st.sampled_from(filled))
    rest = list(boxes)
    rest.remove(victim)
    assert "in no piece" in flaw(rest, shape)
    assert "overlap" in flaw([*boxes, victim], shape)


def test_a_piece_outside_is_found():
    assert "outside" in flaw([Box((0,), (5,))], (4,))
    assert "outside" in flaw([Box((0, 0), (2, 2))], (4,))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors(shape):
    assert flaw([Box.whole(shape)], shape) is None
    assert flaw([], (2,)) == "2 of 2 elements are in no piece"
