"""Sources: samples by index. A source knows nothing of order, epochs or ranks.

A batch is a dict of tensors (keyword arguments of the user's module) or a tuple of tensors (positional ones), each with
the samples along dimension 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sized
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import DataError, PacelineError
from paceline.program.factory import user_line
from paceline.train.data.collate import collate, to_tensor
from paceline.train.data.order import Indices, hold_out

Batch: TypeAlias = dict[str, Tensor] | tuple[Tensor, ...]


class Source(ABC):
    """Samples by index.

    Attributes:
        name: what error messages call it.
        block: samples in a row that had better be read together; None where any order is as good. See `order.Order`.
    """

    name: str
    block: int | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def batch(self, indices: Indices) -> Batch:
        """Return the samples at `indices` ([n]), stacked along dimension 0, in fresh memory."""

    def __getitem__(self, index: int) -> Batch:
        """Return one sample, without the batch dimension."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = self.batch(np.array([index % len(self)], dtype=np.int64))
        if isinstance(batch, dict):
            return {key: tensor[0] for key, tensor in batch.items()}
        return tuple(tensor[0] for tensor in batch)


class Subset(Source):
    """Some samples of another source. `indices`: [n], those samples."""

    def __init__(self, source: Source, indices: Indices, name: str) -> None:
        self.name = name
        self._source = source
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: Indices) -> Batch:
        """See `Source.batch`."""
        return self._source.batch(self._indices[indices])


class ArraySource(Source):
    """Arrays of equal length by name, possibly memory-mapped; sample i is element i of each.

    Raises:
        DataError: there is no array, one has no samples, lengths differ, or a type is not numeric.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], name: str) -> None:
        self.name = name
        self._arrays = dict(arrays)
        if not arrays:
            raise DataError(f"{name} holds no arrays.")
        for key, array in self._arrays.items():
            if array.ndim == 0:
                raise DataError(f"{name}: array '{key}' is a single value; it needs samples along its first dimension.")
            try:
                to_tensor(array[:1])
            except TypeError as error:
                raise DataError(
                    f"{name}: array '{key}' has type {array.dtype}; numbers and booleans can be used."
                ) from error
        lengths = {key: len(array) for key, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"'{key}' {length}" for key, length in lengths.items())
            raise DataError(
                f"{name}: arrays have different numbers of samples: {listed}. Sample i is element i of each."
            )
        self._length = next(iter(lengths.values()))
        if self._length == 0:
            raise DataError(f"{name} is empty: its arrays have no samples.")

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Indices) -> Batch:
        """See `Source.batch`."""
        return {key: to_tensor(array.take(indices, axis=0)) for key, array in self._arrays.items()}


class DatasetSource(Source):
    """A user's map-style dataset: `__len__` and `__getitem__` of a dict or a tuple.

    Items are read one by one in order and stacked; a dataset with `__getitems__`, as PyTorch's data loader knows it,
    is asked for all items of a micro-batch at once.

    Raises:
        DataError: the object is not map-style, or is empty.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.name = name
        self._dataset = dataset
        if isinstance(dataset, torch.utils.data.IterableDataset) or not (
            hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
        ):
            raise DataError(
                f"{name} is a {type(dataset).__name__}, which is not map-style. It needs __len__ and __getitem__: "
                "samples that can only be iterated cannot be seen once each at any number of ranks, or resumed."
            )
        self._length = len(dataset)
        if self._length == 0:
            raise DataError(f"{name} is empty: its length is 0.")

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Indices) -> Batch:
        """See `Source.batch`.

        Raises:
            DataError: the dataset raised an error, or its items cannot be stacked.
        """
        wanted = indices.tolist()
        return collate(self._items(wanted), wanted, self.name)

    def _items(self, wanted: list[int]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            return list(self._read(self._dataset.__getitems__, wanted))
        return [self._read(self._dataset.__getitem__, index) for index in wanted]

    def _read(self, get: Any, what: Any) -> Any:
        try:
            return get(what)
        except PacelineError:
            raise
        except Exception as error:  # the user's code may raise anything; the message keeps their line
            raise DataError(
                f"{self.name}: reading sample {what} failed: {type(error).__name__}: {error}\n  {user_line(error)}"
            ) from error


def split(source: Source, fraction: float) -> tuple[Source, Source | None]:
    """Divide a source into one to train on and one to validate on; no validation when `fraction` is 0.

    Raises:
        DataError: nothing would be left to train on.
    """
    if fraction == 0:
        return source, None
    train, validation = hold_out(len(source), fraction)
    if len(train) == 0:
        raise DataError(
            f"{source.name} holds {len(source)} samples, and validation takes {len(validation)} of them; set "
            "'validation' to a smaller fraction, or to 0."
        )
    return Subset(source, train, source.name), Subset(source, validation, f"{source.name} (validation)")
