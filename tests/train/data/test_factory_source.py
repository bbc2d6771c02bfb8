"""Datasets of the user's own, through a factory."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from paceline.errors import DataError, RecipeError
from paceline.train.data import DataConfig, Loader, open_source

USER = """
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

class Squares(Dataset):
    def __init__(self, length=10):
        self.length = length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return {"x": index, "y": torch.tensor(index * index)}

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))

def pair():
    return Squares(8), Squares(4)

def three():
    return 1, 2, 3

def tensors():
    return torch.utils.data.Subset(TensorDataset(torch.arange(6), torch.ones(6, 2)), [5, 4, 3, 2])

def broken():
    return {}["nothing"]
"""


@pytest.fixture
def opened(tmp_path):
    (tmp_path / "mine.py").write_text(USER)

    def open_(name, **section):
        values = {"source": "factory", "dataset": f"mine.py:{name}", **section}
        return open_source(TypeAdapter(DataConfig).validate_python(values), tmp_path)

    return open_


def test_a_dataset_is_divided_and_a_pair_is_not(opened):
    train, validation = opened("Squares", args={"length": 40})
    assert (len(train), len(validation)) == (38, 2)
    train, validation = opened("pair")
    assert (len(train), len(validation)) == (8, 4)
    assert train.batch(np.array([3, 1]))["y"].tolist() == [9, 1]


def test_tuples_are_positional_and_whole_batches_are_asked_for_at_once(opened):
    train, _ = opened("tensors", validation=0)
    (step,) = Loader(train, 4, shuffle=False).epoch()
    first, second = step.micro_batches[0].batch
    assert first.tolist() == [5, 4, 3, 2] and second.shape == (4, 2)
    assert train[1][0] == 4


def test_a_mapping_of_whole_arrays_is_a_dataset(tmp_path):
    config = TypeAdapter(DataConfig).validate_python({"source": "factory", "dataset": "any:thing"})
    log = {"x": torch.arange(6).reshape(3, 2), "y": np.ones(3, dtype=np.float32)}
    train, validation = open_source(config, tmp_path, resolve=lambda text, base: lambda: (log, log))
    batch = train.batch(np.array([2, 0]))
    assert batch["x"].tolist() == [[4, 5], [0, 1]] and batch["y"].dtype == torch.float32 and len(validation) == 3
    with pytest.raises(DataError, match=r"different numbers of samples: 'x' 3, 'y' 2"):
        open_source(config, tmp_path, resolve=lambda text, base: lambda: log | {"y": torch.ones(2)})


def test_the_resolver_is_a_parameter(tmp_path):
    config = TypeAdapter(DataConfig).validate_python({"source": "factory", "dataset": "any:thing", "validation": 0})
    train, _ = open_source(config, tmp_path, resolve=lambda text, base: lambda: [(1, 2.0), (3, 4.0)])
    assert train.batch(np.array([1]))[1].tolist() == [4.0]


def test_what_cannot_be_used_is_named(opened):
    with pytest.raises(DataError, match=r"is a Stream, which is not map-style. It needs __len__"):
        opened("Stream")
    with pytest.raises(DataError, match="its length is 0"):
        opened("Squares", args={"length": 0})
    with pytest.raises(DataError, match="holds 1 samples, and validation takes 1 of them"):
        opened("Squares", args={"length": 1})
    with pytest.raises(DataError, match="returned 3 values"):
        opened("three")
    with pytest.raises(DataError, match=r"failed: KeyError: 'nothing'\n  .*mine\.py:\d+: return \{\}\[\"nothing\"\]"):
        opened("broken")
    with pytest.raises(RecipeError, match="Did you mean 'Squares'"):
        opened("Square")
