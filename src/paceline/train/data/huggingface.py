"""Hugging Face `datasets`: columns as tensors, or a column of text packed into windows of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import DataError, nearest
from paceline.train.data.codec import Codec, Tokens, open_codec, pack
from paceline.train.data.collate import to_tensor
from paceline.train.data.config import HfData
from paceline.train.data.files import find_files, optional
from paceline.train.data.order import Indices
from paceline.train.data.source import Batch, Source, split
from paceline.train.data.text import WindowSource, split_text

# Documents are tokenized this many at a time, which keeps all cores of the tokenizer busy and memory flat.
_CHUNK = 1000


class ColumnSource(Source):
    """Columns of a dataset as tensors; `columns` maps arguments of the module to columns."""

    def __init__(self, dataset: Any, columns: dict[str, str], name: str) -> None:
        self.name = name
        self._columns = columns
        self._length = len(dataset)
        if self._length == 0:
            raise DataError(f"{name} is empty: it has no rows.")
        for column in columns.values():
            _check_column(dataset, column, name)
        self._rows = dataset.select_columns(sorted(set(columns.values()))).with_format("numpy")

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Indices) -> Batch:
        """See `Source.batch`.

        Raises:
            DataError: a column holds no numbers, or rows of different lengths.
        """
        rows = self._rows[indices.tolist()]
        batch = {}
        for key, column in self._columns.items():
            try:
                batch[key] = to_tensor(np.asarray(rows[column]))
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{self.name}: column '{column}' holds texts, or rows of different lengths (samples "
                    f"{indices.tolist()[:4]}...). Choose others with 'columns', name a 'tokenizer' for text, or pad "
                    "the rows."
                ) from error
        return batch


def open_hf(config: HfData, base_dir: Path) -> tuple[Source, Source | None]:
    """Return the rows of a dataset, and those of `validation_split`, or else a part of the rows, to validate on."""
    dataset = _load(config, config.split, base_dir)
    rest = _load(config, config.validation_split, base_dir) if config.validation_split else None
    name = f"{config.path} ({config.split})"
    rest_name = f"{config.path} ({config.validation_split})"
    if config.tokenizer is None:
        train: Source = ColumnSource(dataset, _columns(config, dataset), name)
        if rest is not None:
            return train, ColumnSource(rest, _columns(config, rest), rest_name)
        return split(train, config.validation)
    codec = open_codec(config.tokenizer, config.separator, base_dir)
    tokens = _tokens_of(dataset, config.text_column, codec, name)
    if rest is None:
        return split_text(tokens, config, config.validation, codec, name)
    others = _tokens_of(rest, config.text_column, codec, rest_name)
    return WindowSource(tokens, config, codec, name), WindowSource(others, config, codec, rest_name)


def _load(config: HfData, split_name: str, base_dir: Path) -> Any:
    datasets = optional("datasets", "hf", "the source 'hf'")
    local = base_dir / Path(config.path).expanduser()
    saved = (local / "dataset_dict.json").is_file() or (local / "state.json").is_file()
    try:
        if saved:
            loaded = datasets.load_from_disk(str(local))
            return (
                _choose(loaded, split_name, config.path)
                if isinstance(loaded, dict)
                else _only(loaded, split_name, config)
            )
        files = [str(path) for path in find_files(config.data_files, base_dir)] or None
        path = str(local) if local.exists() else config.path
        return datasets.load_dataset(path, config.name, data_files=files, split=split_name)
    except DataError:
        raise
    except Exception as error:  # hubs, networks and formats fail in many ways, and the library says how
        raise DataError(f"the dataset '{config.path}' cannot be loaded: {error}") from error


def _choose(splits: Any, name: str, path: str) -> Any:
    if name in splits:
        return splits[name]
    raise DataError(f"{path} has no split '{name}'; it has: {', '.join(splits)}.{nearest(name, splits)}")


def _only(dataset: Any, name: str, config: HfData) -> Any:
    """A dataset saved alone is the training data, whatever it is called; it has no second split."""
    if name == config.split:
        return dataset
    raise DataError(
        f"{config.path} was saved as a single dataset; it has no split '{name}'. Set 'validation' to a fraction."
    )


def _columns(config: HfData, dataset: Any) -> dict[str, str]:
    if isinstance(config.columns, dict):
        return config.columns
    return {name: name for name in (config.columns or dataset.column_names)}


def _check_column(dataset: Any, column: str, name: str) -> None:
    if column not in dataset.column_names:
        names = dataset.column_names
        raise DataError(f"{name} has no column '{column}'; it has: {', '.join(names)}.{nearest(column, names)}")


def _tokens_of(dataset: Any, column: str, codec: Codec, name: str) -> Tokens:
    _check_column(dataset, column, name)
    pieces = [np.zeros(0, dtype=codec.dtype)]
    for start in range(0, len(dataset), _CHUNK):
        rows = dataset[start : start + _CHUNK][column]
        if not all(isinstance(row, str) for row in rows):
            raise DataError(f"{name}: column '{column}' does not hold texts; name the one that does in 'text_column'.")
        pieces.append(pack((row.encode() for row in rows), codec))
    return np.concatenate(pieces)
