"""What the machine allows: plain sockets with memory that is there already, and a copy in memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

from paceline.bench.server.transports_ways import Client, Load, example, wait_for

_PUSH, _PULL, _PUSH_ROWS, _PULL_ROWS, _PING = (bytes([number]) * 64 for number in range(1, 6))
"""Requests, as long as a head must be that says who, what and how much. A push is acknowledged by one of its kind."""


class Memcpy:
    """A copy of as many bytes by this process: what shared memory cannot be faster than."""

    def __init__(self, name: str) -> None:
        del name

    def serve(self, folder: Path, load: Load) -> None:
        """Nobody is needed."""

    def connect(self, folder: Path, load: Load) -> Client:
        """Be the one who copies."""
        dense = example(load)["dense"]
        out = torch.empty_like(dense)
        return Client(push=lambda: out.copy_(dense), pull=lambda: out.copy_(dense))


class Sockets:
    """A TCP or a Unix socket."""

    def __init__(self, name: str) -> None:
        self._unix = name == "raw-unix"

    def serve(self, folder: Path, load: Load) -> None:
        """Be the server until the client is gone."""
        has = {name: memoryview(tensor.numpy()).cast("B") for name, tensor in example(load).items()}
        with _listening(folder, self._unix) as listener:
            sock, _ = listener.accept()
        _tune(sock)
        asked = bytearray(64)
        takes = {_PUSH: [has["dense"]], _PUSH_ROWS: [has["keys"], has["values"]], _PULL_ROWS: [has["keys"]]}
        gives = {_PULL: has["dense"], _PULL_ROWS: has["values"]}
        while _filled(sock, memoryview(asked)):
            kind = bytes(asked)
            for memory in takes.get(kind, ()):
                _filled(sock, memory)
            sock.sendall(gives.get(kind, kind))

    def connect(self, folder: Path, load: Load) -> Client:
        """Be the client."""
        tensors = example(load)
        has = {name: memoryview(tensor.numpy()).cast("B") for name, tensor in tensors.items()}
        where = wait_for(folder / "address").read_text(encoding="utf-8")
        sock = socket.socket(socket.AF_UNIX if self._unix else socket.AF_INET)
        sock.connect(where if self._unix else ("127.0.0.1", int(where)))
        _tune(sock)
        done = memoryview(bytearray(64))

        def ask(pieces: list[bytes | memoryview], into: memoryview) -> bool:
            sent = sock.sendmsg(pieces)
            for piece in pieces:
                if sent < len(piece):
                    sock.sendall(memoryview(piece)[sent:])
                sent = max(0, sent - len(piece))
            return _filled(sock, into)

        return Client(
            push=lambda: ask([_PUSH, has["dense"]], done),
            pull=lambda: (ask([_PULL], has["dense"]), tensors["dense"])[1],
            push_rows=lambda: ask([_PUSH_ROWS, has["keys"], has["values"]], done),
            pull_rows=lambda: (ask([_PULL_ROWS, has["keys"]], has["values"]), tensors["values"])[1],
            rtt=lambda: ask([_PING], done),
            close=sock.close,
        )


def _listening(folder: Path, unix: bool) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    listener.bind(os.fspath(folder / "socket") if unix else ("127.0.0.1", 0))
    listener.listen()
    where = listener.getsockname()
    (folder / "draft").write_text(where if unix else str(where[1]), encoding="utf-8")
    (folder / "draft").rename(folder / "address")
    return listener


def _tune(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _filled(sock: socket.socket, memory: memoryview) -> bool:
    """Receive as much as there is room; return False where the peer is gone."""
    while len(memory):
        count = sock.recv_into(memory, 0, socket.MSG_WAITALL)
        if not count:
            return False
        memory = memory[count:]
    return True
