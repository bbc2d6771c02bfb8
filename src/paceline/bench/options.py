"""What `--set key=value` gives a benchmark, read and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import RecipeError, nearest
from paceline.plan import Mesh
from paceline.runtime.job.backend import Choice

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Name = TypeVar("Name", bound=StrEnum)
Settings = TypeVar("Settings", bound="DataclassInstance")
Reader = Callable[[str, str], Any]
"""Makes a value of a key and its text."""

_UNITS = {"k": 1 << 10, "M": 1 << 20}


def settings_with(defaults: Settings, options: Mapping[str, str], readers: Mapping[str, Reader]) -> Settings:
    """Return settings with what the options say.

    Args:
        defaults: a frozen data class.
        options: texts by key.
        readers: for each key that may be set, what reads its text.

    Raises:
        RecipeError: a key or a value is unknown.
    """
    refuse_unknown(options, list(readers))
    return replace(defaults, **{key: readers[key](key, text) for key, text in options.items()})


def refuse_unknown(options: Mapping[str, str], known: Sequence[str]) -> None:
    """Check that all settings are known.

    Raises:
        RecipeError: one is not.
    """
    for key in options:
        if key not in known:
            raise RecipeError(f"unknown setting '{key}'; known: {', '.join(known)}.{nearest(key, known)}")


def whole_number(key: str, text: str, least: int) -> int:
    """Read a whole number.

    Raises:
        RecipeError: it is none, or below `least`.
    """
    if not text.isdecimal() or int(text) < least:
        raise RecipeError(f"{key} is '{text}'; it is a whole number from {least}.")
    return int(text)


def whole_numbers(key: str, text: str, least: int) -> tuple[int, ...]:
    """Read whole numbers separated by commas; each is returned once.

    Raises:
        RecipeError: one is none, or below `least`.
    """
    return tuple(dict.fromkeys(whole_number(key, part, least) for part in text.split(",")))


def byte_counts(key: str, text: str) -> tuple[int, ...]:
    """Read sizes separated by commas, such as `64,4k,16M`, in bytes; each is returned once.

    Raises:
        RecipeError: one cannot be read.
    """
    counts = []
    for part in text.split(","):
        digits, unit = (part[:-1], _UNITS[part[-1]]) if part[-1:] in _UNITS else (part, 1)
        if not digits.isdecimal() or int(digits) < 1:
            raise RecipeError(f"there is '{part}' in {key}; a size is a number of bytes, such as 64, 4k or 16M.")
        counts.append(int(digits) * unit)
    return tuple(dict.fromkeys(counts))


def names(key: str, text: str, known: Sequence[Name]) -> tuple[Name, ...]:
    """Read names separated by commas; each is returned once.

    Raises:
        RecipeError: one is not among those known.
    """
    by_name = {str(item): item for item in known}
    return tuple(by_name[part] for part in texts(key, text, list(by_name)))


def name(key: str, text: str, known: Sequence[Name]) -> Name:
    """Read one name.

    Raises:
        RecipeError: it is not among those known.
    """
    return names(key, text, known)[0]


def texts(key: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Read words separated by commas; each is returned once.

    Raises:
        RecipeError: one is not among those known.
    """
    for part in text.split(","):
        if part not in known:
            raise RecipeError(f"there is no '{part}' in {key}; known: {', '.join(known)}.{nearest(part, known)}")
    return tuple(dict.fromkeys(text.split(",")))


def yes_or_no(key: str, text: str) -> bool:
    """Read `yes` or `no`.

    Raises:
        RecipeError: it is neither.
    """
    if text not in ("yes", "no"):
        raise RecipeError(f"{key} is '{text}'; it is yes or no.")
    return text == "yes"


def path(_key: str, text: str) -> Path:
    """Read the path of a file."""
    return Path(text)


def text(_key: str, text: str) -> str:
    """Read a text as it is."""
    return text


def backend(_key: str, text: str) -> Choice:
    """Read what carries tensors between ranks.

    Raises:
        LaunchError: it is unknown.
    """
    return Choice.parse(text)


def meshes(_key: str, text: str) -> tuple[str, ...]:
    """Read meshes separated by semicolons, such as `dp=2;dp=2,tp=2`; each is returned once.

    Raises:
        PlanError: one cannot be read.
    """
    return tuple(dict.fromkeys(str(Mesh.parse(mesh)) for mesh in text.split(";")))
