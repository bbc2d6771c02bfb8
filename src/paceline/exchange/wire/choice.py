"""Which implementation of frames this process has: native code where there is a compiler, else Python. Equal bytes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any, Final, Protocol

import numpy as np

from paceline.errors import ConnectionLost, ExchangeError, nearest
from paceline.exchange.wire.build import BuildError, native
from paceline.exchange.wire.codec import TYPES, announced, head
from paceline.exchange.wire.frame import Frame, Meta, Placing, no_numbers
from paceline.exchange.wire.guarded import Guarded, Users
from paceline.exchange.wire.memory import check_fit, no_room

CHOICE: Final = "PACELINE_WIRE"
"""Environment variable: `native` or `portable` allow one implementation only."""
_KNOWN: Final = ("native", "portable")
_AHEAD_BYTES: Final = 4 << 10
"""Read before it is asked for: a small frame is one call of the system."""


class Wire(Protocol):
    """Frames of one connection in native code (`native/wire.hpp`). One thread sends at a time, and one receives.

    Attributes:
        sent_bytes, received_bytes: of the frames that it sent and received.
    """

    sent_bytes: int
    received_bytes: int

    def send(self, frame: Frame, /) -> bool:
        """Send a frame; False: nothing was sent, and `codec` has to look at it."""
        ...

    def receive(self, place: Placing | None, /) -> Frame | tuple[Frame, int, Sequence[Meta]] | None:
        """Wait for a frame; None: the peer closed the connection.

        Returns:
            The frame; or with it its segment (0: none) and its metas where its tensors are not in it: they are in the
            segment, or have too many bytes and come next.
        """
        ...

    def files(self) -> list[int]:
        """Return the descriptors that came with frames; they belong to the caller."""
        ...


class Native(Protocol):
    """What native code offers to a connection."""

    def users(self) -> Users:
        """Return those of a socket."""
        ...

    def wire(self, sock: Guarded, sending: Lock, *, ahead: bool, most_bytes: int) -> Wire:
        """Return frames over a socket.

        Args:
            sock: with `users` of this.
            sending: held by who sends.
            ahead: what follows a frame's head may be read with it. Not where descriptors come with frames, or where
                others read from the socket what comes next.
            most_bytes: of tensors that simply follow their head.
        """
        ...


class _Native:
    def __init__(self, module: Any) -> None:
        self._module = module
        self._language = module.Language(
            frame=Frame,
            meta=Meta,
            head=head,
            announced=announced,
            fitting=check_fit,
            full=no_room,
            lost=ConnectionLost,
            array=np.frombuffer,
            number=np.dtype(np.int64),
            no_numbers=no_numbers(),
            types=TYPES,
        )

    def users(self) -> Users:
        made: Users = self._module.Users()
        return made

    def wire(self, sock: Guarded, sending: Lock, *, ahead: bool, most_bytes: int) -> Wire:
        reads = _AHEAD_BYTES if ahead else 0
        made: Wire = self._module.Wire(self._language, sock.users, sock.sock, sock.name, sending, reads, most_bytes)
        return made


@cache
def chosen() -> Native | None:
    """Return native code, if it is to be used; None: this process has Python only.

    Raises:
        ExchangeError: the environment asks for what is not there.
    """
    choice = os.environ.get(CHOICE, "")
    if choice and choice not in _KNOWN:
        raise ExchangeError(f"{CHOICE} is '{choice}'; it is {', '.join(_KNOWN)}, or not set.{nearest(choice, _KNOWN)}")
    if choice == "portable":
        return None
    try:
        return _Native(native())
    except BuildError as error:
        if choice:
            raise ExchangeError(f"{CHOICE} is {choice}, and the native part cannot be built here: {error}.") from error
        warnings.warn(f"messages are made in Python, slower than they could be: {error}", stacklevel=2)
        return None
