"""Collation: items of a dataset become one batch of tensors. Says which key of which samples does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import DataError


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Return a numeric array as a tensor that shares its memory where it can.

    As with Python's own numbers, 64-bit floats take PyTorch's default type; unsigned integers of more than 8 bits, for
    which PyTorch has few operators, become int64.

    Raises:
        TypeError: the type has no counterpart in PyTorch: texts, objects, dates.
    """
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "biufc":
        raise TypeError(f"no tensor of {array.dtype}")
    dtype = array.dtype.newbyteorder("=")
    if kind == "f" and size > 8:
        dtype = np.dtype(np.float64)
    if kind == "u" and size > 1:
        dtype = np.dtype(np.int64)
    tensor = torch.from_numpy(np.require(array, dtype=dtype, requirements=["C", "W"]))
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def collate(items: Sequence[Any], indices: Sequence[int], name: str) -> dict[str, Tensor] | tuple[Tensor, ...]:
    """Stack items along a new dimension 0.

    Args:
        items: mappings, tuples or lists of tensors, arrays and numbers, or one such value each; all alike.
        indices: number of each item in its dataset, for messages.
        name: what messages call the dataset.

    Raises:
        DataError: items have different keys or numbers of fields, shapes differ, or a value is of another type.
    """
    first = items[0]
    if isinstance(first, Mapping):
        for item, index in zip(items, indices, strict=True):
            if not isinstance(item, Mapping) or item.keys() != first.keys():
                raise DataError(f"{name}: sample {indices[0]} has {_shape(first)}, sample {index} has {_shape(item)}.")
        if not all(isinstance(key, str) for key in first):
            raise DataError(f"{name}: keys of items must be names of arguments, not {list(first)!r}.")
        return {key: _stack([item[key] for item in items], indices, f"{name}, key '{key}'") for key in first}
    if isinstance(first, tuple | list):
        for item, index in zip(items, indices, strict=True):
            if not isinstance(item, tuple | list) or len(item) != len(first):
                raise DataError(f"{name}: sample {indices[0]} has {_shape(first)}, sample {index} has {_shape(item)}.")
        columns = zip(*items, strict=True)
        return tuple(_stack(values, indices, f"{name}, field {field}") for field, values in enumerate(columns))
    return (_stack(items, indices, name),)


def _shape(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"keys {', '.join(map(str, item))}"
    return f"{len(item)} fields" if isinstance(item, tuple | list) else f"type {type(item).__name__}"


def _stack(values: Sequence[Any], indices: Sequence[int], where: str) -> Tensor:
    tensors = [_leaf(value, index, where) for value, index in zip(values, indices, strict=True)]
    for tensor, index in zip(tensors, indices, strict=True):
        if tensor.shape != tensors[0].shape:
            raise DataError(
                f"{where}: shapes differ: {list(tensors[0].shape)} in sample {indices[0]}, {list(tensor.shape)} in "
                f"sample {index}. Samples of a micro-batch are stacked; pad or crop them to one shape in the dataset."
            )
    return torch.stack(tensors)


def _leaf(value: Any, index: int, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, bool | int | float | complex):
        return torch.tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        try:
            return to_tensor(np.asarray(value))
        except TypeError as error:
            raise DataError(
                f"{where}: sample {index} has type {value.dtype}; numbers and booleans can be used."
            ) from error
    raise DataError(
        f"{where}: sample {index} has type {type(value).__name__}; tensors, arrays and numbers can be stacked into a "
        "batch."
    )
