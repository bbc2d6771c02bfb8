"""Files of a snapshot: safetensors, each with its length and digest, so that damage is noticed before it is loaded."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.shard.manifest import cannot_write


@dataclass(frozen=True)
class File:
    """A file as it was written.

    Attributes:
        name: in the directory of its snapshot.
        size_bytes: its length.
        digest: BLAKE2b of its content.
    """

    name: str
    size_bytes: int
    digest: str

    @classmethod
    def write(cls, directory: Path, name: str, tensors: Mapping[str, Tensor]) -> Self:
        """Write tensors, in whole or not at all.

        Raises:
            ExchangeError: there is no room, or no permission.
        """
        path, draft = directory / name, directory / f".{name}.{secrets.token_hex(4)}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(dict(tensors), draft)
            written = cls(name, draft.stat().st_size, _digest(draft))
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            draft.replace(path)
        except (OSError, SafetensorError) as error:
            draft.unlink(missing_ok=True)
            raise cannot_write(path, error) from error
        return written

    def link(self, source: Path, target: Path) -> None:
        """Have it in the directory of another snapshot too, without a copy where the file system can.

        Raises:
            ExchangeError: it is gone, or there is no room for a copy.
        """
        path, other = source / self.name, target / self.name
        try:
            target.mkdir(parents=True, exist_ok=True)
            other.unlink(missing_ok=True)
            try:
                os.link(path, other)
            except FileNotFoundError:
                raise
            except OSError:
                shutil.copyfile(path, other)
        except OSError as error:
            raise cannot_write(other, error) from error

    def read(self, directory: Path) -> dict[str, Tensor]:
        """Read the tensors.

        Raises:
            ExchangeError: it is missing, truncated or damaged.
        """
        path = directory / self.name
        try:
            size = path.stat().st_size
            if size != self.size_bytes:
                raise ExchangeError(
                    f"{path} has {size} bytes, and {self.size_bytes} were written; take the snapshot before."
                )
            if _digest(path) != self.digest:
                raise ExchangeError(f"{path} is damaged: its digest is another; take the snapshot before.")
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ExchangeError(f"cannot read {path} ({error}); take the snapshot before.") from error

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
