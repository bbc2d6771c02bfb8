"""Tensor files: safetensors files written as a stream with a checksum, and read by slices.

The file format is plain safetensors, readable by everybody. The writer is ours because it makes no copy of the data,
takes the checksum in the same pass, forces the bytes to the disk, and reports a full disk as the `OSError` it is.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.placement.boxes import Box, Patch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK = 8 << 20  # bytes: large enough that the interpreter lock is free nearly always, small enough to stay in cache


@dataclass(frozen=True)
class Spec:
    """Type and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class FileFacts:
    """What tells a whole file from a broken one: its length in bytes and the CRC-32 of them."""

    bytes: int
    crc32: int


def dtype_code(dtype: torch.dtype, name: str) -> str:
    """Return the safetensors code of `dtype`; `name` is the tensor the error message speaks of.

    Raises:
        CheckpointError: safetensors cannot hold this type.
    """
    if dtype not in _CODES:
        known = ", ".join(str(known).removeprefix("torch.") for known in _CODES)
        raise CheckpointError(f"'{name}' has type {dtype}, which safetensors cannot hold; it can hold {known}.")
    return _CODES[dtype]


def write_tensors(
    path: Path, specs: Mapping[str, Spec], fetch: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> FileFacts:
    """Write a safetensors file, fetching one tensor at a time, and force it to the disk.

    Args:
        path: the file, overwritten.
        specs: type and shape by name.
        fetch: gives the tensor of a name, on the CPU.
        metadata: the strings of the header's `__metadata__`.

    Raises:
        CheckpointError: a type that safetensors cannot hold.
        OSError: the disk is full or not writable.
    """
    # Widest type first, as safetensors does: every tensor then begins at a multiple of its element's size.
    order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        spec = specs[name]
        begin, end = end, end + Box.whole(spec.shape).size * spec.dtype.itemsize
        code = dtype_code(spec.dtype, name)
        header[name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    crc = 0
    with open(path, "wb") as file:
        for block in _blocks(head, (fetch(name) for name in order)):
            file.write(block)
            crc = zlib.crc32(block, crc)
        length = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(length, crc)


def file_facts(path: Path) -> FileFacts:
    """Read a file and return its length and checksum.

    Raises:
        OSError: the file cannot be read.
    """
    crc = length = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_CHUNK):
            crc = zlib.crc32(block, crc)
            length += len(block)
    return FileFacts(length, crc)


def _blocks(head: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file in order."""
    yield len(head).to_bytes(8, "little") + head
    for tensor in tensors:
        tensor = tensor.detach().contiguous()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]


class TensorFiles:
    """Safetensors files of one folder, opened when first needed and closed together.

    Use as a context manager. Only the bytes that are asked for are read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def specs(self, file: str) -> dict[str, Spec]:
        """Return type and shape of every tensor in `file`.

        Raises:
            CheckpointError: the file is missing, truncated or not a safetensors file.
        """
        handle = self._handle(file)
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - not a mapping
        return {name: Spec(DTYPES[part.get_dtype()], tuple(part.get_shape())) for name, part in slices.items()}

    def read(self, file: str, name: str, held: Patch, wanted: Box) -> Tensor:
        """Read `wanted` of a tensor of which `file` holds a piece that has the patch `held`.

        Raises:
            CheckpointError: the file cannot be read or has no such tensor.
        """
        handle = self._handle(file)
        try:
            stored = handle.get_slice(name)
            box = held.find(wanted)
            if box == Box.whole(stored.get_shape()):
                found: Tensor = handle.get_tensor(name)
            else:
                found = stored[box.index]
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / file}: cannot read '{name}': {error}.") from error
        return found

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self._folder / file
            try:
                # safe_open is a native class without type information.
                self._open[file] = self._stack.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is not a whole safetensors file: {error}. It is missing, truncated or of another format."
                ) from error
        return self._open[file]
