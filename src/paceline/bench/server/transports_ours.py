"""Frames of `exchange.wire`, with a server that keeps what was pushed where it arrived."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from paceline.bench.server.transports_ways import Client, Load, example, wait_for
from paceline.errors import ConnectionLost
from paceline.exchange.view import Address
from paceline.exchange.wire.connect import connect
from paceline.exchange.wire.frame import Frame
from paceline.exchange.wire.listen import Listener

_SECRET = b"of a benchmark"
_PUSH, _PULL, _PULL_ROWS, _DONE = range(1, 5)


class Ours:
    """A transport by name; `tcp-4`: over four connections."""

    def __init__(self, name: str) -> None:
        self._transport, _, streams = name.partition("-")
        self._streams = int(streams or 1)

    def serve(self, folder: Path, load: Load) -> None:
        """Be the server until the client is gone."""
        has = example(load)
        listener = Listener("127.0.0.1", _SECRET, unix=str(folder / "socket"))
        (folder / "draft").write_text(json.dumps(asdict(listener.address)), encoding="utf-8")
        (folder / "draft").rename(folder / "address")
        connection = listener.accept()
        answers: dict[int, list[Tensor]] = {_PUSH: [], _PULL: [has["dense"]], _PULL_ROWS: [has["values"]]}
        try:
            while True:
                asked = connection.receive()
                connection.send(Frame(_DONE, request=asked.request, tensors=answers[asked.kind]))
        except ConnectionLost:
            listener.close()

    def connect(self, folder: Path, load: Load) -> Client:
        """Be the client."""
        address = Address(**json.loads(wait_for(folder / "address").read_text(encoding="utf-8")))
        connection = connect(address, _SECRET, transport=self._transport, streams=self._streams)
        has = example(load)
        out = torch.empty_like(has["dense"])
        dense, both, keys = [has["dense"]], [has["keys"], has["values"]], [has["keys"]]

        def ask(kind: int, tensors: list[Tensor], into: list[Tensor] | None = None) -> Frame:
            connection.send(Frame(kind, tensors=tensors))
            return connection.receive(None if into is None else lambda frame, metas: into)

        placed = self._transport != "shared"
        return Client(
            push=lambda: ask(_PUSH, dense),
            pull=lambda: ask(_PULL, [], [out] if placed else None).tensors[0],
            push_rows=lambda: ask(_PUSH, both),
            pull_rows=lambda: ask(_PULL_ROWS, keys).tensors[0],
            rtt=lambda: ask(_PUSH, []),
            pull_placed=None if placed else lambda: ask(_PULL, [], [out]).tensors[0],
            close=connection.close,
        )
