"""Frames as bytes: a head of fixed size, what the head announces, and the tensors as they lie in memory.

    head     magic, kind, segment, counts; epoch, request, worker, sequence, clock, weight
    rest     numbers; type, rank and shape of each tensor; text
    tensors  their bytes, one after the other, in the sender's order of bytes (little-endian, or it is refused)

Nothing of it is executed. Whatever arrives is checked against limits before memory is taken for it.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import ExchangeError
from paceline.exchange.wire.frame import Frame, Meta

MAX_TENSOR_BYTES: Final = 64 << 30
"""Most that the tensors of a frame may have."""

_MAX_REST_BYTES: Final = 256 << 20
_MAX_RANK: Final = 64
_MAGIC: Final = b"PLX1"
_HEAD: Final = struct.Struct("<4sHHIIIIqqqqqd")
HEAD_BYTES: Final = _HEAD.size
_SEGMENT_AT: Final = struct.calcsize("<4sH")

TYPES: Final = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""Of tensors that can be sent; frames have their numbers."""
_SIZES: Final = tuple(dtype.itemsize for dtype in TYPES)
_BFLOAT16: Final = TYPES.index(torch.bfloat16)
NUMPY_TYPES: Final = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype for dtype in TYPES if dtype is not torch.bfloat16
}
"""Types that NumPy has too: it makes arrays of memory in fewer calls than PyTorch makes tensors."""
_NUMBERS: Final = {NUMPY_TYPES[dtype].num: number for number, dtype in enumerate(TYPES) if dtype in NUMPY_TYPES}
_SHAPES: Final = tuple(struct.Struct(f"<BB{rank}Q") for rank in range(_MAX_RANK + 1))

Laid: TypeAlias = tuple[int, NDArray[Any]]
"""Number of a tensor's type, and where it lies."""


class Head(NamedTuple):
    """The fixed part of a frame.

    Attributes:
        segment: number of the shared memory in which the tensors lie, from 1; 0: they follow (see `shared`).
        tensors, numbers: how many there are.
        shapes_bytes, text_bytes: of the rest.
    """

    kind: int
    segment: int
    tensors: int
    numbers: int
    shapes_bytes: int
    text_bytes: int
    epoch: int
    request: int
    worker: int
    sequence: int
    clock: int
    weight: float

    @property
    def rest_bytes(self) -> int:
        """What comes before the tensors."""
        return 8 * self.numbers + self.shapes_bytes + self.text_bytes


def encoded(frame: Frame) -> tuple[bytes, list[memoryview]]:
    """Return the head and the rest of a frame, and its tensors where they lie (those that are not empty).

    A tensor that is not contiguous is copied.

    Raises:
        ExchangeError: the frame cannot be sent.
    """
    laid = [_laid(tensor) for tensor in frame.tensors]
    shapes = b"".join([_SHAPES[at.ndim].pack(number, at.ndim, *at.shape) for number, at in laid])
    numbers = np.ascontiguousarray(frame.numbers, dtype=np.int64).tobytes()
    text = frame.text.encode()
    if len(numbers) + len(shapes) + len(text) > _MAX_REST_BYTES:
        raise ExchangeError(
            f"a frame with {len(numbers) // 8} numbers, {len(laid)} tensors and {len(text)} bytes of text is too "
            f"large; what is not tensors may have {_MAX_REST_BYTES >> 20} MiB. Send large things as tensors."
        )
    views = [at.data.cast("B") for _, at in laid if at.size]
    total = sum(map(len, views))
    if total > MAX_TENSOR_BYTES:
        raise ExchangeError(
            f"tensors of {total} bytes do not go into one frame, which may have {MAX_TENSOR_BYTES >> 30} GiB; "
            "divide the job into more shards."
        )
    fields = frame.epoch, frame.request, frame.worker, frame.sequence, frame.clock, frame.weight
    counts = len(laid), len(numbers) // 8, len(shapes), len(text)
    try:
        head = _HEAD.pack(_MAGIC, frame.kind, 0, *counts, *fields)
    except struct.error as error:
        raise ExchangeError(
            f"a frame of kind {frame.kind} has a field that is no number of 64 bits: {error}"
        ) from error
    return b"".join((head, numbers, shapes, text)), views


def in_segment(first: bytes, segment: int) -> bytes:
    """Return the head and the rest of a frame whose tensors lie in shared memory."""
    return first[:_SEGMENT_AT] + struct.pack("<H", segment) + first[_SEGMENT_AT + 2 :]


def head(data: bytes | bytearray) -> Head:
    """Read a head.

    Raises:
        ExchangeError: it is none.
    """
    magic, *fields = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise ExchangeError(
            f"what arrived is no frame: it begins with {bytes(data[:8])!r} in place of {_MAGIC!r}. Do both ends have "
            "the same version of Paceline?"
        )
    read = Head(*fields)
    if read.rest_bytes > _MAX_REST_BYTES or 2 * read.tensors > read.shapes_bytes:
        raise ExchangeError(
            f"a frame announces {read.numbers} numbers, {read.tensors} tensors and {read.text_bytes} bytes of text, "
            f"with shapes of {read.shapes_bytes} bytes; that cannot be."
        )
    return read


def announced(read: Head, rest: bytearray) -> tuple[Frame, list[Meta]]:
    """Return a frame without its tensors, and what they are.

    Args:
        read: the head.
        rest: `read.rest_bytes` bytes; the numbers stay in them.

    Raises:
        ExchangeError: it cannot be read.
    """
    shapes_at = 8 * read.numbers
    text_at = shapes_at + read.shapes_bytes
    numbers = np.frombuffer(rest, dtype=np.int64, count=read.numbers)
    metas = _metas(read.tensors, memoryview(rest)[shapes_at:text_at])
    try:
        text = rest[text_at:].decode()
    except UnicodeDecodeError as error:
        raise ExchangeError(f"a frame's text is no UTF-8: {error}") from None
    fields = read.epoch, read.request, read.worker, read.sequence, read.clock, read.weight
    return Frame(read.kind, *fields, numbers, text), metas


def nbytes(meta: Meta) -> int:
    """Return the bytes of a tensor."""
    return math.prod(meta.shape) * meta.dtype.itemsize


def views_of(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Return where tensors lie, those that are not empty. They are contiguous."""
    return [at.data.cast("B") for _, at in map(_laid, tensors) if at.size]


def _laid(tensor: Tensor) -> Laid:
    try:
        at: NDArray[Any] = tensor.numpy()
        number = _NUMBERS[at.dtype.num]
    except (TypeError, RuntimeError, KeyError):  # it is bfloat16 or has a gradient, or cannot be sent
        number, at = _laid_otherwise(tensor)
    return number, at if at.flags.c_contiguous else np.ascontiguousarray(at)


def _laid_otherwise(tensor: Tensor) -> Laid:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ExchangeError(
            f"a tensor on {tensor.device} with layout {tensor.layout} cannot be sent; bring it to the CPU, dense."
        )
    if tensor.dtype not in TYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
        raise ExchangeError(f"tensors of type {tensor.dtype} cannot be sent; those of {known} can.")
    plain = tensor.detach().resolve_neg()
    if plain.dtype is torch.bfloat16:
        return _BFLOAT16, plain.view(torch.int16).numpy()
    return TYPES.index(plain.dtype), plain.numpy()


def _metas(count: int, shapes: memoryview) -> list[Meta]:
    metas, at, total = [], 0, 0
    for _ in range(count):
        if at + 2 > len(shapes) or at + 2 + 8 * shapes[at + 1] > len(shapes):
            raise ExchangeError("a frame's shapes end too early.")
        number, rank = shapes[at], shapes[at + 1]
        if number >= len(TYPES) or rank > _MAX_RANK:
            raise ExchangeError(f"a frame has a tensor of unknown type {number} with {rank} dimensions.")
        shape = _SHAPES[rank].unpack_from(shapes, at)[2:]
        at += 2 + 8 * rank
        total += math.prod([extent or 1 for extent in shape]) * _SIZES[number]
        if total > MAX_TENSOR_BYTES:
            raise ExchangeError(
                f"a frame announces tensors of more than {MAX_TENSOR_BYTES >> 30} GiB, among them one of shape {shape}."
            )
        metas.append(Meta(TYPES[number], shape))
    if at != len(shapes):
        raise ExchangeError(f"a frame's shapes have {len(shapes) - at} bytes too many.")
    return metas


if sys.byteorder != "little":
    raise ExchangeError("this machine's order of bytes is not that of frames, which are little-endian.")
