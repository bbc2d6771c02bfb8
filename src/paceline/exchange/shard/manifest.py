"""What makes a snapshot whole: a manifest, written once all shards are there. No PyTorch: the coordinator writes it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from paceline.durable import settle
from paceline.errors import ExchangeError

_NAME: Final = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """A snapshot: all shards as they were at some moment, each by itself.

    Attributes:
        number: of the snapshot; its directory is named by it.
        clock: all tasks of clocks below it are in every shard, and maybe some others.
        first_task: where the job goes on from it; tasks that a shard has beyond count once all the same.
        epoch: in which it was taken.
        files: of each shard the file that says what belongs to it.
    """

    number: int
    clock: int
    first_task: int
    epoch: int
    files: Mapping[int, str]

    def write(self, directory: Path) -> None:
        """Write it into the directory of the snapshot, which is whole from then on.

        Raises:
            ExchangeError: it cannot be written; the snapshots before are kept.
        """
        write_json(
            directory / _NAME, {**asdict(self), "files": {str(shard): name for shard, name in self.files.items()}}
        )
        try:
            settle(directory.parent)  # whoever made the directory may have been killed before it did so
        except OSError as error:
            raise cannot_write(directory, error) from error

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the manifest of the snapshot in a directory.

        Raises:
            ExchangeError: there is none, or it cannot be read.
        """
        values = read_json(directory / _NAME)
        try:
            return cls(**{**values, "files": {int(shard): name for shard, name in values["files"].items()}})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ExchangeError(f"{directory / _NAME} is no manifest of a snapshot ({error}).") from error


def whole_snapshots(snapshots: Path) -> tuple[int, ...]:
    """Return the numbers of the snapshots in a directory that are whole, in rising order."""
    return tuple(sorted(int(path.parent.name) for path in snapshots.glob(f"*/{_NAME}") if path.parent.name.isdigit()))


def write_json(path: Path, values: Any) -> None:
    """Write a file that is there in whole or not at all, also after a loss of power.

    Raises:
        ExchangeError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        settle(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote.

    Raises:
        ExchangeError: it is not there, or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExchangeError(
            f"cannot read {path} ({error.strerror}); a snapshot without it is not whole: take the one before."
        ) from error
    except ValueError as error:
        raise ExchangeError(f"{path} is damaged ({error}); take the snapshot before.") from error


def cannot_write(path: Path, error: Exception) -> ExchangeError:
    """Return what to say of a snapshot that cannot be written."""
    reason = error.strerror if isinstance(error, OSError) else error
    return ExchangeError(f"cannot write {path} ({reason}); the snapshots before are kept. Make room on the disk.")
