"""From a recipe's `data` section to sources: one to train on and, unless refused, one to validate on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import DataError, PacelineError
from paceline.program.factory import load_factory, user_line
from paceline.train.data.arrays import open_digits, open_numpy
from paceline.train.data.config import (
    CriteoData,
    DataConfig,
    DigitsData,
    FactoryData,
    HfData,
    LibsvmData,
    NumpyData,
    StdlibData,
    TextData,
)
from paceline.train.data.criteo import open_criteo
from paceline.train.data.huggingface import open_hf
from paceline.train.data.libsvm import open_libsvm
from paceline.train.data.source import ArraySource, DatasetSource, Source, split
from paceline.train.data.text import open_stdlib, open_text

Resolve = Callable[[str, Path], Callable[..., Any]]


def open_source(
    config: DataConfig, base_dir: Path = Path(), resolve: Resolve = load_factory
) -> tuple[Source, Source | None]:
    """Open the data that `config` describes.

    Args:
        config: the `data` section of a recipe.
        base_dir: folder that relative paths are relative to.
        resolve: finds the callable of a factory.

    Returns:
        The source to train on, and the one to validate on (None when `validation` is 0).

    Raises:
        DataError: something is missing, unreadable, empty or too small; the message names it.
        RecipeError: a factory cannot be found or imported.
    """
    match config:
        case StdlibData():
            return open_stdlib(config)
        case TextData():
            return open_text(config, base_dir)
        case NumpyData():
            return open_numpy(config, base_dir)
        case DigitsData():
            return open_digits(config)
        case HfData():
            return open_hf(config, base_dir)
        case LibsvmData():
            return open_libsvm(config, base_dir)
        case CriteoData():
            return open_criteo(config, base_dir)
        case FactoryData():
            return _open_factory(config, base_dir, resolve)


def _open_factory(config: FactoryData, base_dir: Path, resolve: Resolve) -> tuple[Source, Source | None]:
    factory = resolve(config.dataset, base_dir)
    try:
        made = factory(**config.args)
    except PacelineError:
        raise
    except Exception as error:  # the user's code may raise anything; the message keeps their line
        raise DataError(
            f"the dataset factory '{config.dataset}' failed: {type(error).__name__}: {error}\n  {user_line(error)}"
        ) from error
    if isinstance(made, tuple):
        if len(made) != 2:
            raise DataError(
                f"the dataset factory '{config.dataset}' returned {len(made)} values; it returns a dataset, or a pair "
                "of one to train on and one to validate on."
            )
        train, validation = made
        name = f"the dataset of '{config.dataset}'"
        rest = None if validation is None else _as_source(validation, f"{name} (validation)")
        return _as_source(train, name), rest
    return split(_as_source(made, f"the dataset of '{config.dataset}'"), config.validation)


def _as_source(made: Any, name: str) -> Source:
    if isinstance(made, Source):
        return made
    if isinstance(made, Mapping) and all(isinstance(value, torch.Tensor | np.ndarray) for value in made.values()):
        return ArraySource({key: np.asarray(value) for key, value in made.items()}, name)
    return DatasetSource(made, name)
