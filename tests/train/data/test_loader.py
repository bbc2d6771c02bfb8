"""The loader: every sample once at any number of ranks, resumable at any other, and no thread left behind."""

import threading
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataError, PlanError
from paceline.train.data import Loader
from paceline.train.data.source import ArraySource, DatasetSource


def numbers(length):
    return ArraySource({"x": np.arange(length)}, "the numbers")


def samples_of(steps_of_ranks):
    """The global order of one step seen by all ranks together; whole micro-batches must agree."""
    order = []
    for parts in zip(*(step.micro_batches for step in steps_of_ranks), strict=True):
        values = [part.batch["x"].tolist() for part in parts]
        assert len({(part.whole, part.samples) for part in parts}) == 1
        if parts[0].whole:
            assert all(value == values[0] for value in values)
            values = values[:1]
        merged = [value for rank in values for value in rank]
        assert len(merged) == parts[0].samples
        order.extend(merged)
    return order


def epoch_of(length, batch, micro_batches, ranks, seed, number, **options):
    loaders = [Loader(numbers(length), batch, micro_batches, (rank, ranks), seed, **options) for rank in range(ranks)]
    return [samples_of(steps) for steps in zip(*(loader.epoch(number) for loader in loaders), strict=True)]


@st.composite
def shapes(draw):
    """Batch 12 divides by every number of ranks up to 4; micro-batches keep that true for those drawn."""
    micro_batches = draw(st.integers(1, 3))
    return draw(st.integers(1, 60)), 12 * micro_batches, micro_batches


@settings(max_examples=25)
@given(shapes(), st.integers(0, 2**64 - 1), st.integers(0, 5), st.booleans())
def test_one_global_order_at_any_number_of_ranks(shape, seed, epoch, shuffle):
    length = shape[0]
    serial = epoch_of(*shape, ranks=1, seed=seed, number=epoch, shuffle=shuffle)
    assert sorted(chain(*serial)) == list(range(length))
    for ranks in (2, 3, 4):
        assert epoch_of(*shape, ranks=ranks, seed=seed, number=epoch, shuffle=shuffle) == serial


@settings(max_examples=25)
@given(shapes(), st.integers(0, 7), st.integers(1, 4), st.integers(1, 4))
def test_resuming_at_another_number_of_ranks_goes_on_in_the_same_order(shape, done, before, after):
    length, batch, micro_batches = shape
    serial = iter(Loader(numbers(length), batch, micro_batches, seed=5))
    expected = [samples_of([next(serial)]) for _ in range(done + 4)]
    first = [Loader(numbers(length), batch, micro_batches, (rank, before), seed=5) for rank in range(before)]
    iterators = [iter(loader) for loader in first]
    seen = [samples_of([next(iterator) for iterator in iterators]) for _ in range(done)]
    state = first[0].state_dict()
    assert all(loader.state_dict() == state for loader in first)
    second = [Loader(numbers(length), batch, 1, (rank, after), seed=5) for rank in range(after)]
    for loader in second:
        loader.load_state_dict(state)
    iterators = [iter(loader) for loader in second]
    seen += [samples_of([next(iterator) for iterator in iterators]) for _ in range(4)]
    assert seen == expected


def test_steps_go_on_over_epochs_and_each_epoch_has_its_own_order():
    loader = Loader(numbers(10), batch=4)
    assert len(loader) == 3
    with loader:
        steps = [step for step, _ in zip(loader, range(7), strict=False)]
    assert [(step.epoch, step.index, step.samples) for step in steps[:6]] == [
        (0, 0, 4), (0, 1, 4), (0, 2, 2), (1, 0, 4), (1, 1, 4), (1, 2, 2)
    ]  # fmt: skip
    first, second = ([x for step in steps[i : i + 3] for x in samples_of([step])] for i in (0, 3))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second


def test_last_small_step_is_divided_as_far_as_it_goes():
    rank_1 = Loader(numbers(12 + 11), batch=12, micro_batches=3, shard=(1, 2), shuffle=False)
    *_, last = rank_1.epoch()
    assert [(part.samples, part.whole) for part in last.micro_batches] == [
        (4, False),
        (4, False),
        (2, False),
        (1, True),
    ]
    assert [part.batch["x"].tolist() for part in last.micro_batches] == [[14, 15], [18, 19], [21], [22]]


def test_drop_last():
    assert len(Loader(numbers(10), batch=4, drop_last=True)) == 2
    with pytest.raises(DataError, match="the numbers holds 3 samples, fewer than one batch of 4"):
        Loader(numbers(3), batch=4, drop_last=True)


def test_all_ranks_in_one_process_load_everything_cut_for_the_ranks():
    loader = Loader(numbers(7), batch=4, shuffle=False, divisor=2)
    parts = [part for step in loader.epoch() for part in step.micro_batches]
    assert [(part.batch["x"].tolist(), part.whole) for part in parts] == [
        ([0, 1, 2, 3], False),
        ([4, 5], False),
        ([6], True),
    ]
    with pytest.raises(PlanError, match="shard 0 of 2 cannot load for 3 parts"):
        Loader(numbers(7), batch=6, shard=(0, 2), divisor=3)


def test_example_is_a_regular_micro_batch_of_all_ranks():
    loader = Loader(numbers(30), batch=8, micro_batches=2, shard=(1, 2), shuffle=False)
    assert loader.example()["x"].tolist() == [0, 1, 2, 3]


def test_an_epoch_read_on_the_side_does_not_move_the_loader():
    loader = Loader(numbers(10), batch=5)
    before = loader.state_dict()
    assert len(list(loader.epoch(3))) == 2
    assert loader.state_dict() == before


def test_the_position_is_behind_the_step_that_was_handed_out_not_the_one_read_ahead():
    loader = Loader(numbers(40), batch=4)
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (0, 2)
    resumed = Loader(numbers(40), batch=4)
    resumed.load_state_dict(loader.state_dict())
    assert samples_of([next(iter(resumed))]) == samples_of([next(iterator)])


def test_resuming_with_another_batch_keeps_the_samples_that_are_left():
    loader = Loader(numbers(24), batch=4)
    steps = iter(loader)
    seen = [samples_of([next(steps)]) for _ in range(2)]
    other = Loader(numbers(24), batch=8)
    other.load_state_dict(loader.state_dict())
    rest = [samples_of([step]) for step, _ in zip(other, range(2), strict=False)]
    assert sorted(chain(*seen, *rest)) == list(range(24))
    with pytest.raises(DataError, match=r"behind 8 samples of epoch 0 .* no multiple of the batch of 6"):
        Loader(numbers(24), batch=6).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 99}, "saved with data of 99 samples, but the numbers now holds 24"),
        ({"seed": 1}, "saved with seed 1, and now seed is 0"),
        ({"shuffle": False}, "saved with shuffle False, and now shuffle is True"),
    ],
)
def test_a_position_in_other_data_is_refused(change, message):
    loader = Loader(numbers(24), batch=4)
    with pytest.raises(DataError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(DataError, match="lacks step, batch"):
        loader.load_state_dict({"epoch": 0, "seed": 0, "shuffle": True, "length": 24})


class Failing(torch.utils.data.Dataset):
    """Item 6 cannot be read until it is repaired."""

    broken = True

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 6 and self.broken:
            raise ValueError("the disk says no")
        return {"x": index}


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("paceline-data")]


def test_an_error_while_reading_ahead_reaches_the_consumer_at_its_step():
    dataset = Failing()
    loader = Loader(DatasetSource(dataset, "my data"), batch=4, shuffle=False)
    iterator = iter(loader)
    assert next(iterator).index == 0
    with pytest.raises(
        DataError, match=r"my data: reading sample 6 failed: ValueError: the disk says no\n.*raise Value"
    ):
        next(iterator)
    assert not data_threads()
    dataset.broken = False
    assert next(iter(loader)).index == 1


@pytest.mark.parametrize("leave", ["close", "break", "error", "end", "load"])
def test_no_thread_is_left_behind(leave):
    loader = Loader(numbers(40), batch=4)
    if leave == "end":
        list(loader.epoch())
    elif leave == "break":
        for _ in loader:
            break
    elif leave == "error":
        with pytest.raises(ZeroDivisionError), loader:
            for _ in loader:
                raise ZeroDivisionError
    else:
        iterators = [iter(loader), loader.epoch()]
        for iterator in iterators:
            next(iterator)
        assert len(data_threads()) == 2
        loader.close() if leave == "close" else loader.load_state_dict(loader.state_dict())
        assert [list(iterator) for iterator in iterators] == [[], []]
    assert not data_threads()


def test_bad_seeds_and_shards_are_refused():
    with pytest.raises(DataError, match="seed is -1"):
        Loader(numbers(4), batch=2, seed=-1)
    with pytest.raises(PlanError, match="shard 2 of 2"):
        Loader(numbers(4), batch=2, shard=(2, 2))
