"""Signals that are noted rather than acted on, for who has something to finish first."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NotedSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP do nothing but stand in `received`.

    Handlers belong to the main thread; entered in another one, nothing is noted.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> NotedSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # Who was told to ignore hang-ups (nohup) goes on doing so.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
