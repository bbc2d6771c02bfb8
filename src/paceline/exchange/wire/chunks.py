"""Large tensors are copied chunk by chunk, so that who copies them on at the other end need not wait for all of it.

What was just written is still in the cache when it is read, and two processors copy at the same time. Each chunk is
told of where that is asked for, and the rest at the end: to be woken for nothing costs more than a chunk.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from paceline.errors import ConnectionLost

CHUNK_BYTES: Final = 4 << 20
_QUICK_BYTES: Final = 128 << 10
_TOLD: Final = b"\1"


class Part(NamedTuple):
    """Bytes `begin` to `end` of one of several pieces of memory."""

    piece: int
    begin: int
    end: int


def chunked(counts: Sequence[int]) -> Iterator[list[Part]]:
    """Divide pieces of so many bytes, in order, into chunks of 4 MiB; the last one has the rest."""
    chunk: list[Part] = []
    room = CHUNK_BYTES
    for piece, count in enumerate(counts):
        begin = 0
        while begin < count:
            end = min(count, begin + room)
            chunk.append(Part(piece, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def chunk_count(total: int) -> int:
    """Return into how many chunks so many bytes are divided."""
    return -(-total // CHUNK_BYTES)


def give(
    sock: socket.socket, to: Sequence[memoryview], source: Sequence[memoryview], asked: Callable[[], bool]
) -> None:
    """Copy pieces, and tell of each chunk that is there.

    Args:
        sock: to who reads.
        to: as long as those of `source`.
        source: what is copied.
        asked: whether to tell at once.
    """
    untold = 0
    for chunk in chunked([len(view) for view in source]):
        for piece, begin, end in chunk:
            copy(to[piece][begin:end], source[piece][begin:end])
        untold += 1
        if asked():
            sock.sendall(_TOLD * untold)
            untold = 0
    sock.sendall(_TOLD * untold)


def take(sock: socket.socket, to: Sequence[memoryview], source: Sequence[memoryview]) -> None:
    """Copy pieces that `give` is filling at the other end.

    Raises:
        ConnectionLost: the peer is gone before all is there.
    """
    counts = [len(view) for view in source]
    left, ready = chunk_count(sum(counts)), 0
    for chunk in chunked(counts):
        if not ready:
            ready = _heard(sock, left)
            left -= ready
        ready -= 1
        for piece, begin, end in chunk:
            copy(to[piece][begin:end], source[piece][begin:end])


def await_all(sock: socket.socket, total: int) -> None:
    """Return when all that `give` copies is there.

    Raises:
        ConnectionLost: the peer is gone before.
    """
    left = chunk_count(total)
    while left:
        left -= _heard(sock, left)


def copy(to: memoryview, source: memoryview) -> None:
    """Copy memory; much of it without the interpreter's lock."""
    if len(source) < _QUICK_BYTES:
        to[:] = source
    else:
        torch.frombuffer(to, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))


def _heard(sock: socket.socket, most: int) -> int:
    count = len(sock.recv(most))
    if not count:
        raise ConnectionLost("the peer went away in the middle of a frame.")
    return count
