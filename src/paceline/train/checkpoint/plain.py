"""Plain values: what JSON gives back just as it was."""

from __future__ import annotations

from typing import Any

from paceline.errors import CheckpointError


def plain(value: object, where: str) -> Any:
    """Return a copy of `value` that JSON can hold, tuples as lists; `where` names it in the error.

    Raises:
        CheckpointError: it contains anything but None, bool, int, float, str, lists and dictionaries with text keys.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise CheckpointError(f"{where} has the key {key!r}; keys must be text, as JSON has no others.")
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold. It holds None, bool, int, float, str, "
        "lists and dictionaries; call .item() or .tolist() on numbers of NumPy and PyTorch."
    )
