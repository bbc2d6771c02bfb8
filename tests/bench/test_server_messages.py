"""`paceline bench server`, messages, at toy size, its server in a thread; and what its figures are made of."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.bench.server import messages
from paceline.bench.server.main import main
from paceline.errors import RecipeError


class _Process(threading.Thread):
    """What is asked of a process."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        *others, pipe = args  # a process has it besides who starts it
        super().__init__(target=target, args=(*others, Connection(os.dup(pipe.fileno()))), daemon=daemon)

    def kill(self) -> None:
        assert not self.is_alive()


def test_one_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    in_here = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=_Process)
    monkeypatch.setattr(messages.multiprocessing, "get_context", lambda kind: in_here)
    asked = {"parts": "messages", "message_rows": "10", "message_rounds": "2", "message_repetitions": "3"}
    result = json.loads(json.dumps(main({**asked, "message_ways": "unix", "message_shards": "1,3"})))
    assert [(one["way"], one["shards"]) for one in result["messages"]] == [("unix", 1), ("unix", 3)]
    for one in result["messages"]:
        rates = {key: value for key, value in one.items() if key.endswith("rows_s")}
        assert set(rates) == {f"{what}_{of}_rows_s" for what in ("push", "pull") for of in ("wall", "worker", "server")}
        assert all(math.isfinite(rate) and rate > 0 for rate in rates.values())
    assert result["settings"]["messages"]["message_rows"] == 10
    assert "through a server, one after the other" in " ".join(capsys.readouterr().out.split())


def test_rates_are_of_messages() -> None:
    times = {"push": [messages._Time(wall=2.0, worker=0.5, server=0.25)]}
    found = messages._rates(times, rows=100)
    assert (found["push_wall_rows_s"], found["push_worker_rows_s"], found["push_server_rows_s"]) == (50, 200, 400)


def test_settings_are_checked() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'message_rows'"):
        main({"message_row": "1", "parts": "messages"})
    with pytest.raises(RecipeError, match="Did you mean 'shared'"):
        main({"message_ways": "share", "parts": "messages"})
