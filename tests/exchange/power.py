"""A disk that loses its power: of each file there is what was synced, of each directory the names that it had then."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import NamedTuple

import pytest


class Image(NamedTuple):
    """What there is after a loss of power, by inode.

    Attributes:
        files: their content.
        names: of each directory, with the inodes that they name.
    """

    files: dict[int, bytes]
    names: dict[int, dict[str, int]]

    def restore(self, inode: int, into: Path) -> None:
        """Write a directory as it is then."""
        into.mkdir()
        for name, held in self.names.get(inode, {}).items():
            if held in self.names:
                self.restore(held, into / name)
            else:  # of a file that was never synced there is the name
                (into / name).write_bytes(self.files.get(held, b""))


class Disk:
    """Sees what this process syncs below a directory, from now on. Files are not deleted meanwhile."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root = root.stat().st_ino
        self._files: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {self._root: {}}
        self._lock = threading.Lock()
        patch.setattr(os, "fsync", self._sync)
        patch.setattr(os, "fdatasync", self._sync)

    def image(self) -> Image:
        """Return what there would be if the power went now."""
        with self._lock:
            return Image(dict(self._files), dict(self._names))

    def restore(self, image: Image, into: Path) -> None:
        """Write all of an image into a new directory."""
        image.restore(self._root, into)

    def _sync(self, file: int) -> None:
        with self._lock:
            status = os.fstat(file)
            if stat.S_ISDIR(status.st_mode):
                entries = [entry for entry in os.scandir(file) if entry.is_dir() or entry.is_file()]
                self._names[status.st_ino] = {entry.name: entry.inode() for entry in entries}
                for entry in entries:
                    if entry.is_dir():  # it is there, with what it was synced with
                        self._names.setdefault(entry.inode(), {})
            else:
                self._files[status.st_ino] = Path(f"/proc/self/fd/{file}").read_bytes()
