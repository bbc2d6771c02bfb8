"""What the coordinator and members say to each other: JSON, each message after its length.

A member's messages bear rising numbers `n`. `{"answer": n}` says that message n was heard, and all before it: whatever
it changed is in the coordinator's store. What was not confirmed is said again over the next connection.

    join     the first of each connection: who this is and what it holds; answered by id and view, or by `fenced`
    beat     every fifth of a lease, with figures now and then; answered
    next     asks for work; answered at once, or when there is some
    done, back   of tasks and evaluations
    synced, turned, unreached   of servers: a replica is complete; a head may change; a successor is not reached
    file, unwritten     of servers: a shard is in a snapshot, or cannot be
    leave    answered once nothing depends on the member
    close    gone, at once
    status, snapshot   of observers

and, unasked, the coordinator tells members of a `view`, of `orphans`, of a `snapshot` to write and of the `end`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from paceline.errors import ExchangeError

Message: TypeAlias = dict[str, Any]

_LENGTH: Final = struct.Struct("!I")
LONGEST_BYTES: Final = 64 << 20
"""Longest message; a view of a thousand shards takes some 30 KB."""


def packed(message: Message) -> bytes:
    """Return what is sent for a message."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


class Incoming:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, arrived: bytes) -> Iterator[Message]:
        """Take what arrived; yield the messages that are complete.

        Raises:
            ExchangeError: it is no message.
        """
        self._bytes += arrived
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > LONGEST_BYTES:
                raise ExchangeError(f"a message of {length} bytes is longer than any that members send.")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            text = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            try:
                message = json.loads(text)
            except ValueError as error:
                raise ExchangeError(f"a message is no JSON: {error}") from error
            if not isinstance(message, dict):
                raise ExchangeError("a message is no JSON object.")
            yield message
