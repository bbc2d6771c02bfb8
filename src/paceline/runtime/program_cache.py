"""Captured and placed programs on disk, so that a second start of the same job needs no capture.

An entry is one safetensors file, named by its key: the program as JSON text beside the tensors that tracing lifted out
of the user's code. Nothing in it is ever unpickled. The cache never stops a job: what cannot be read or written is a
line in the log. This module does not know what a program is, nor what makes a key (`program.fingerprint`).
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from paceline.errors import FingerprintError
from paceline.program.sources import source_hashes, still_current

Json = Any
SIZE_LIMIT = 512 << 20
_FORMAT = "paceline-program-1"
_PROGRAM = "program.json"
_CONSTANT = "constant."
_SUFFIX = ".safetensors"
_COMPRESS_FROM = 1 << 20
_ABANDONED_AFTER = 3600.0
_KEY = re.compile(r"[0-9a-f]{16,128}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """What was stored under a key: a JSON value, and tensors by name with the strides and devices they had."""

    data: dict[str, Json]
    constants: dict[str, Tensor] = field(default_factory=dict)


def default_directory() -> Path | None:
    """Return `$PACELINE_CACHE`, or `~/.cache/paceline/programs`; None when the variable says `off`."""
    given = os.environ.get("PACELINE_CACHE", "")
    if given.lower() == "off":
        return None
    return Path(given).expanduser() if given else Path.home() / ".cache" / "paceline" / "programs"


class ProgramCache:
    """Entries by key in one directory; safe to share between processes.

    Args:
        directory: where entries are; made with mode 0700 when first stored to. None: nothing is stored or found.
            Files or a directory that belong to another user, or that others may write, are not read: a wrong program
            is a silently wrong gradient.
        size_limit: bytes; beyond it the entries that were used least recently are removed.
    """

    def __init__(self, directory: Path | None, size_limit: int = SIZE_LIMIT) -> None:
        self.directory = directory
        self.size_limit = size_limit

    def load(self, key: str) -> Entry | None:
        """Return the entry of `key`, or None. A damaged or outdated one is removed.

        An entry is outdated when a source file that was loaded at the time it was stored is different now.
        """
        if self.directory is None:
            return None
        path = self._path(key)
        try:
            if not _is_ours(self.directory.stat()):
                _log.warning("program cache %s is not read: others may write to it (chmod 700)", self.directory)
                return None
            content = read_ours(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("cannot read the cached program %s: %s", path, error)
            return None
        if content is None:
            _log.warning("cached program %s is not read: it is not a file that only you may write", path)
            return None
        try:
            entry, sources = _unpack(content)
        except (SafetensorError, OSError, EOFError, KeyError, ValueError, TypeError, RuntimeError) as error:
            _log.warning("cached program %s is damaged and removed (%s); capturing again", path, error)
            _remove(path)
            return None
        changed = still_current(sources)
        if changed is not None:
            _log.info("cached program %s is outdated: %s has changed", path.name, changed)
            _remove(path)
            return None
        with contextlib.suppress(OSError):  # a cache on a read-only disk is still a cache
            os.utime(path)
        return entry

    def store(
        self,
        key: str,
        data: Mapping[str, Json],
        constants: Mapping[str, Tensor] | None = None,
        packages: Collection[str] = (),
    ) -> bool:
        """Write an entry whole or not at all, and return whether it was written.

        Args:
            key: hexadecimal, see `program.fingerprint.fingerprint`.
            data: a JSON value.
            constants: tensors that belong to it.
            packages: `Fingerprint.packages`. The entry holds hashes of the source files of these, and of the user,
                that are loaded now, and so of what the capture itself imported.
        """
        if self.directory is None:
            return False
        path = self._path(key)
        try:
            content = _pack(dict(data), dict(constants or {}), source_hashes(packages))
        except (FingerprintError, SafetensorError, ValueError, TypeError, RuntimeError, KeyError) as error:
            _log.info("the program is not cached: %s", error)
            return False
        if len(content) > self.size_limit:
            _log.info("the program is not cached: %d bytes are over the limit of %d", len(content), self.size_limit)
            return False
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(self.directory.stat()):
                _log.warning("program cache %s is not used: others may write to it (chmod 700)", self.directory)
                return False
            write_atomically(path, content)
            self._trim(keep=path)
        except OSError as error:
            _log.warning("the program is not cached: %s", error)
            return False
        return True

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"a cache key is hexadecimal, not '{key}'")
        assert self.directory is not None
        return self.directory / (key + _SUFFIX)

    def _trim(self, keep: Path) -> None:
        """Remove leftovers of killed writers, then the least recently used entries, until the rest fits."""
        entries = []
        for path, status in self._files():
            if path.suffix == ".tmp":
                if time.time() - status.st_mtime > _ABANDONED_AFTER:
                    _remove(path)
            elif path.suffix == _SUFFIX:
                entries.append((path != keep, -status.st_mtime, status.st_size, path))
        total = 0
        for _, _, size, path in sorted(entries):
            total += size
            if total > self.size_limit:
                _remove(path)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        assert self.directory is not None
        with os.scandir(self.directory) as listing:
            for item in listing:
                with contextlib.suppress(FileNotFoundError):  # another process trims as well
                    yield Path(item.path), item.stat(follow_symlinks=False)


def _is_ours(status: os.stat_result) -> bool:
    """Return whether the current user owns it and nobody else may write it. Windows keeps no such bits."""
    if os.name == "nt":
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read_ours(path: Path) -> bytes | None:
    """Return the content, or None when it is not a plain file of ours; checked on the open file, which stays one."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        return file.read() if stat.S_ISREG(status.st_mode) and _is_ours(status) else None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; only its owner may read it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16], suffix=".tmp")  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        _remove(Path(temporary))
        raise


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # gone already, or not ours to remove: the next run tries again
        path.unlink()


def _pack(data: dict[str, Json], constants: dict[str, Tensor], sources: dict[str, str]) -> bytes:
    layouts = {name: [list(tensor.stride()), str(tensor.device)] for name, tensor in constants.items()}
    body = {"data": data, "sources": sources, "layouts": layouts}
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    compressed = len(text) >= _COMPRESS_FROM
    if compressed:
        text = gzip.compress(text, 1, mtime=0)
    tensors = {_CONSTANT + name: _dense_copy(tensor) for name, tensor in constants.items()}
    tensors[_PROGRAM] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    metadata = {"format": _FORMAT, "compressed": str(compressed), "digest": _digest(tensors)}
    return bytes(save_tensors(tensors, metadata))


def _unpack(content: bytes) -> tuple[Entry, dict[str, str]]:
    tensors = load_tensors(content)
    header = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + header])["__metadata__"]
    if metadata["format"] != _FORMAT:
        raise ValueError(f"its format is '{metadata['format']}', not '{_FORMAT}'")
    if metadata["digest"] != _digest(tensors):
        raise ValueError("its content does not match its digest")
    text = tensors.pop(_PROGRAM).numpy().tobytes()
    body = json.loads(gzip.decompress(text) if metadata["compressed"] == "True" else text)
    constants = {}
    for name, (stride, device) in body["layouts"].items():
        dense = tensors[_CONSTANT + name]
        constants[name] = torch.empty_strided(dense.shape, stride, dtype=dense.dtype, device=device).copy_(dense)
    return Entry(body["data"], constants), body["sources"]


def _dense_copy(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor or tensor.is_meta:
        raise TypeError(f"a constant is a {type(tensor).__name__} without values that can be written")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError("a constant is an expanded tensor, whose elements share memory")
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
