"""Arrays: NumPy files of the user's, and scikit-learn's digits."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError, nearest
from paceline.train.data.config import DigitsData, NumpyData
from paceline.train.data.files import optional, reading
from paceline.train.data.source import ArraySource, Source, split


def open_numpy(config: NumpyData, base_dir: Path) -> tuple[Source, Source | None]:
    """Return the arrays of NumPy files, .npy ones memory-mapped; nothing is ever unpickled."""
    source = _source(config.arrays, base_dir)
    if config.validation_arrays is not None:
        return source, _source(config.validation_arrays, base_dir)
    return split(source, config.validation)


def open_digits(config: DigitsData) -> tuple[Source, Source | None]:
    """Return scikit-learn's 1,797 digits: images of 8x8 from 0 to 1, and labels from 0 to 9."""
    datasets = optional("sklearn.datasets", "data", "the source 'digits'")
    digits = datasets.load_digits()
    images = (digits.images / 16).astype(np.float32)
    shape = (-1, 1, 8, 8) if config.image else (-1, 64)
    image_key, label_key = config.keys
    arrays = {image_key: images.reshape(shape), label_key: digits.target.astype(np.int64)}
    return split(ArraySource(arrays, "the digits"), config.validation)


def _source(arrays: str | dict[str, str], base_dir: Path) -> Source:
    if isinstance(arrays, str):
        path = base_dir / Path(arrays).expanduser()
        content = _load(path)
        return ArraySource(content if isinstance(content, Mapping) else {path.stem: content}, str(path))
    members = {key: _member(place, base_dir) for key, place in arrays.items()}
    return ArraySource(members, f"the arrays {', '.join(sorted(set(arrays.values())))}")


def _member(place: str, base_dir: Path) -> NDArray[Any]:
    """Return the array at `file.npy` or `file.npz:name`."""
    file, colon, name = place.rpartition(":")
    if not (colon and file.endswith(".npz")):
        file, name = place, ""
    content = _load(base_dir / Path(file).expanduser())
    if not isinstance(content, Mapping):
        return content
    if name in content:
        return content[name]
    if not name and len(content) == 1:
        return next(iter(content.values()))
    what = f"no array '{name}'" if name else f"{len(content)} arrays; choose one as '{file}:name'"
    raise DataError(f"{file} holds {what}. It holds: {', '.join(content)}.{nearest(name, content)}")


def _load(path: Path) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Return the array of a .npy file or the arrays of a .npz file.

    Raises:
        DataError: the file cannot be read, is empty, cut off, no NumPy file, or holds pickled objects.
    """
    with reading(path):
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty; it should be a .npy or .npz file.")
        try:
            if not zipfile.is_zipfile(path):
                array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
                return array
            with np.load(path, allow_pickle=False) as archive:
                return dict(archive)
        except OSError:
            raise
        except Exception as error:  # damaged bytes make NumPy, zlib and Python's own tokenizer raise what they like
            raise DataError(f"{path} cannot be used: {_reason(path, error)}") from error


def _reason(path: Path, error: Exception) -> str:
    """Say in plain words what NumPy found, which names pickle for every file that it does not know."""
    if "Object arrays" in str(error) or "Python objects in dtype" in str(error):
        return (
            "it holds an array of Python objects. Loading those would run code from the file, so it is refused; save "
            "numbers: np.save(path, np.stack(rows)) after padding rows to one length."
        )
    with path.open("rb") as file:
        known = file.read(6) in (b"\x93NUMPY", b"PK\x03\x04\x14\x00", b"PK\x03\x04-\x00")
    if not known:
        return "it is not a NumPy array: it does not begin like a .npy or .npz file. Write it with np.save or np.savez."
    return f"it is cut off or damaged ({error}). Write it anew."
