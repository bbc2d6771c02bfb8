"""Items to batches, and what cannot be stacked."""

import numpy as np
import pytest
import torch

from paceline.errors import DataError
from paceline.train.data.collate import collate, to_tensor


def test_dicts_tuples_and_single_values():
    items = [{"x": np.float32(i), "y": i, "z": torch.full((2,), i)} for i in range(3)]
    batch = collate(items, [0, 1, 2], "d")
    assert batch["x"].dtype == torch.float32 and batch["y"].tolist() == [0, 1, 2] and batch["z"].shape == (3, 2)
    pair = collate([(torch.zeros(2, 2), True), [torch.ones(2, 2), False]], [0, 1], "d")
    assert pair[0].shape == (2, 2, 2) and pair[1].tolist() == [True, False]
    assert collate([1.5, 2.5], [0, 1], "d")[0].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"x": np.zeros(2)}, {"x": np.zeros(3)}], r"d, key 'x': shapes differ: \[2\] in sample 4, \[3\] in sample 9"),
        ([(0, np.zeros(2)), (0, np.zeros(3))], r"d, field 1: shapes differ: \[2\] in sample 4, \[3\] in sample 9"),
        ([{"x": 0}, {"y": 0}], "sample 4 has keys x, sample 9 has keys y"),
        ([(0, 1), (0,)], "sample 4 has 2 fields, sample 9 has 1 fields"),
        ([{"x": "text"}, {"x": "text"}], "key 'x': sample 4 has type str; tensors, arrays and numbers"),
        ([{"x": np.array(["a"])}, {"x": np.array(["b"])}], "key 'x': sample 4 has type <U1"),
        ([{1: 0}, {1: 0}], "keys of items must be names"),
    ],
)
def test_what_cannot_be_stacked_is_named(items, message):
    with pytest.raises(DataError, match=message):
        collate(items, [4, 9], "d")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float64", torch.float32),
        ("float16", torch.float16),
        (">f4", torch.float32),
        ("uint8", torch.uint8),
        ("uint16", torch.int64),
        (">i4", torch.int32),
        ("bool", torch.bool),
        ("complex64", torch.complex64),
    ],
)
def test_types_of_arrays(given, expected):
    tensor = to_tensor(np.array([0, 1, 1], dtype=given))
    assert tensor.dtype == expected and tensor.real.tolist() == [0, 1, 1]


def test_read_only_arrays_are_copied_and_writable_ones_shared():
    array = np.zeros(2, dtype=np.float32)
    to_tensor(array)[0] = 1
    assert array[0] == 1
    array.flags.writeable = False
    to_tensor(array)[0] = 2
    assert array[0] == 1
