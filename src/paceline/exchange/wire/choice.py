"""Which implementation of frames this process has: native code where there is a compiler, else Python. Equal bytes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Final, Protocol

import numpy as np

from paceline.errors import ConnectionLost, ExchangeError, nearest
from paceline.exchange.wire.build import BuildError, native
from paceline.exchange.wire.codec import TYPES, announced, head
from paceline.exchange.wire.frame import Frame, Meta, Placing
from paceline.exchange.wire.memory import check_fit, no_room

CHOICE: Final = "PACELINE_WIRE"
"""Environment variable: `native` or `portable` allow one implementation only."""
_KNOWN: Final = ("native", "portable")
_AHEAD_BYTES: Final = 4 << 10
"""Read before it is asked for: a small frame is one call of the system."""


class Wire(Protocol):
    """Frames of one connection in native code (`native/wire.hpp`). One thread sends, and one receives."""

    def send(self, socket: int, frame: Frame, most_bytes: int) -> int:
        """Send a frame whose tensors have at most so many bytes. Returns its bytes; -1: nothing was sent."""
        ...

    def receive(
        self, socket: int, place: Placing | None, most_bytes: int
    ) -> tuple[Frame, int, int, Sequence[Meta] | None] | None:
        """Wait for a frame; None: the peer closed the connection.

        Returns:
            The frame, its bytes, its segment (0: none), and its metas where its tensors are not in it: they are in the
            segment, or have more than `most_bytes` and come next.
        """
        ...

    def files(self) -> list[int]:
        """Return the descriptors that came with frames; they belong to the caller."""
        ...


def wire(*, ahead: bool) -> Wire | None:
    """Return native code for a connection; None: this process has Python only.

    Args:
        ahead: what follows a frame's head may be read with it. Not where descriptors come with frames, or where others
            read from the socket what comes next.
    """
    found = _chosen()
    if found is None:
        return None
    module, language = found
    made: Wire = module.Wire(language, _AHEAD_BYTES if ahead else 0)
    return made


@cache
def _chosen() -> tuple[Any, Any] | None:
    """Return the native module and what it is told of Python, if it is to be used.

    Raises:
        ExchangeError: the environment asks for what is not there.
    """
    choice = os.environ.get(CHOICE, "")
    if choice and choice not in _KNOWN:
        raise ExchangeError(f"{CHOICE} is '{choice}'; it is {', '.join(_KNOWN)}, or not set.{nearest(choice, _KNOWN)}")
    if choice == "portable":
        return None
    try:
        module = native()
    except BuildError as error:
        if choice:
            raise ExchangeError(f"{CHOICE} is {choice}, and the native part cannot be built here: {error}.") from error
        warnings.warn(f"messages are made in Python, slower than they could be: {error}", stacklevel=2)
        return None
    language = module.Language(
        frame=Frame,
        meta=Meta,
        head=head,
        announced=announced,
        fitting=check_fit,
        full=no_room,
        lost=ConnectionLost,
        numbers=partial(np.frombuffer, dtype=np.int64),
        types=TYPES,
    )
    return module, language
