"""Peers that die, close, or send what is no frame: the receiver learns of it at once, and nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.wire.codec import HEAD_BYTES, encoded
from paceline.exchange.wire.frame import Connection, Frame
from paceline.exchange.wire.listen import Listener
from paceline.exchange.wire.shared import SharedConnection
from paceline.exchange.wire.sockets import SocketConnection
from tests.exchange.wire.pairs import SECRET, TRANSPORTS, pair, reach
from tests.forked import Forked

FRAME = Frame(5, epoch=3, numbers=np.arange(4), text="what", tensors=[torch.arange(6.0).view(2, 3), torch.ones(5)])


def raw(frame: Frame) -> bytes:
    first, views = encoded(frame)
    return b"".join([first, *views])


def receiving(data: bytes) -> Frame:
    """Return what native code and Python make of bytes after which the peer is gone: the same."""
    try:
        made = made_of(data, portable=True)
    except ExchangeError as error:
        with pytest.raises(type(error)) as found:
            made_of(data, portable=False)
        assert (type(found.value), str(found.value)) == (type(error), str(error))
        raise
    assert raw(made_of(data, portable=False)) == raw(made)
    return made


def made_of(data: bytes, *, portable: bool) -> Frame:
    ours, theirs = socket.socketpair()
    connection = SocketConnection(ours)
    if portable:
        connection._wire = None
    try:
        theirs.sendall(data)
        theirs.close()
        return connection.receive()
    finally:
        connection.close()


def test_every_truncated_frame_is_a_lost_connection() -> None:
    data = raw(FRAME)
    assert receiving(data).text == "what"
    for count in range(len(data)):
        with pytest.raises(ConnectionLost):
            receiving(data[:count])


@given(st.binary(min_size=HEAD_BYTES, max_size=400))
@settings(max_examples=100)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ExchangeError, match="no frame"):
        receiving(data)


@given(at=st.integers(0, len(raw(FRAME)) - 1), byte=st.integers(0, 255))
@example(at=117, byte=189)  # more memory than there is, on most machines
@settings(max_examples=300)
def test_a_changed_byte_is_an_error_or_another_frame(at: int, byte: int) -> None:
    """Never anything else, such as an error of ours, or memory for what cannot be."""
    data = bytearray(raw(FRAME))
    data[at] = byte
    try:
        receiving(bytes(data))
    except ExchangeError:
        return


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((2**31, 0, 0, 0), "cannot be"),
        ((0, 2**32 - 1, 0, 0), "cannot be"),
        ((0, 0, 0, 2**32 - 1), "cannot be"),
        ((1, 0, 2, 0), "unknown type"),
        ((0, 0, 3, 0), "too many"),
        ((1, 0, 3, 0), "too early"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts: tuple[int, ...], said: str) -> None:
    head = struct.pack("<4sHHIIIIqqqqqd", b"PLX1", 1, 0, *counts, 0, 0, 0, 0, 0, 1.0)
    rest = {2: b"\xff\x00", 3: b"\x00\x09\x00"}.get(counts[2], b"")
    with pytest.raises(ExchangeError, match=said):
        receiving(head + rest)


@pytest.mark.parametrize("shape", [(2**40,), (2**63, 2**63), (0, 2**63), (2**20,) * 4, (0, 2**36, 2**36)])
def test_a_shape_beyond_all_memory_is_refused(shape: tuple[int, ...]) -> None:
    shapes = struct.pack(f"<BB{len(shape)}Q", 8, len(shape), *shape)
    head = struct.pack("<4sHHIIIIqqqqqd", b"PLX1", 1, 0, 1, 0, len(shapes), 0, 0, 0, 0, 0, 0, 1.0)
    with pytest.raises(ExchangeError, match="GiB"):
        receiving(head + shapes)


def test_text_that_is_none_is_refused() -> None:
    head = struct.pack("<4sHHIIIIqqqqqd", b"PLX1", 1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 1.0)
    with pytest.raises(ExchangeError, match="UTF-8"):
        receiving(head + b"\xff\xff")


def test_shared_memory_on_a_connection_without_it_is_refused() -> None:
    data = bytearray(raw(FRAME))
    data[6] = 1
    with pytest.raises(ExchangeError, match="has none"):
        receiving(bytes(data))


@pytest.mark.parametrize("segment", [1, 3])
def test_shared_memory_that_never_came_is_refused(segment: int) -> None:
    (ours, theirs), (turns, others) = socket.socketpair(), socket.socketpair()
    data = bytearray(raw(FRAME))
    data[6] = segment
    theirs.sendall(data)
    connection = SharedConnection(ours, turns)
    with pytest.raises(ExchangeError, match="no such room"):
        connection.receive()
    for sock in (theirs, others):
        sock.close()


def test_memory_that_could_shrink_is_refused() -> None:
    (ours, theirs), (turns, others) = socket.socketpair(), socket.socketpair()
    data = bytearray(raw(FRAME))
    data[6] = 1
    file = os.memfd_create("not-sealed")
    os.ftruncate(file, 1 << 20)
    socket.send_fds(theirs, [data], [file])
    os.close(file)
    connection = SharedConnection(ours, turns)
    with pytest.raises(ExchangeError, match="not sealed"):
        connection.receive()
    for sock in (theirs, others):
        sock.close()


def test_a_place_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for out in ([torch.empty(3)], [torch.empty(7), torch.empty(5)], [torch.empty(3, 2).t(), torch.empty(5)]):
        with pair("unix", tmp_path) as (client, server):
            client.send(FRAME)
            with pytest.raises(ExchangeError, match="place"):
                server.receive(lambda frame, metas, out=out: out)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_close_wakes_who_receives(transport: str, tmp_path: Path) -> None:
    with pair(transport, tmp_path) as (client, _):
        assert isinstance(ended(client.receive, client.close), ConnectionLost)
        with pytest.raises(ConnectionLost, match="closed"):
            client.send(FRAME)
        client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_close_wakes_who_sends_to_somebody_who_does_not_receive(transport: str, tmp_path: Path) -> None:
    def send() -> None:
        while True:
            client.send(Frame(1, tensors=[torch.zeros(1 << 20)]))

    with pair(transport, tmp_path) as (client, _):
        assert isinstance(ended(send, client.close), ConnectionLost)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_closes_is_gone_after_what_it_sent(transport: str, tmp_path: Path) -> None:
    with pair(transport, tmp_path) as (client, server):
        count = 50_000 if transport == "shared" else 10_000  # what the system holds for a reader
        for index in range(2):
            server.send(Frame(index, tensors=[torch.full((count,), float(index))]))
        server.close()
        for index in range(2):
            assert client.receive().tensors[0][0] == index
        with pytest.raises(ConnectionLost):
            client.receive()


def test_a_peer_that_is_killed_is_gone(tmp_path: Path) -> None:
    """In the middle of frames that it sends, and of such that it was to read, on all transports."""
    listener = Listener("127.0.0.1", SECRET, unix=str(tmp_path / "socket"))
    address = json.dumps(asdict(listener.address))
    victim = Forked("tests.exchange.wire.victim", address, *TRANSPORTS, output=1)
    found: dict[str, BaseException] = {}

    def go_on(server: Connection) -> None:
        who = server.receive().text
        met.release()
        try:
            while True:
                if who.endswith("sending"):
                    server.receive()
                else:
                    server.send(Frame(1, tensors=[torch.zeros(2 << 20)]))
        except BaseException as error:
            found[who] = error
        server.close()

    met = threading.Semaphore(0)
    too_late = threading.Timer(30, listener.close)
    too_late.start()
    count = 2 * len(TRANSPORTS)
    try:
        threads = [threading.Thread(target=go_on, args=(listener.accept(),), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        assert all(met.acquire(timeout=20) for _ in range(count))
        time.sleep(0.1)
        assert not found
        victim.send(signal.SIGKILL)
        for thread in threads:
            thread.join(20)
        assert len(found) == count, found
        assert {type(error) for error in found.values()} == {ConnectionLost}
    finally:
        victim.kill()
        too_late.cancel()
        listener.close()


def ended(work: Callable[[], object], end: Callable[[], object]) -> BaseException | None:
    """Return what work in a thread ends with, when something is done while it is at it."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    end()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    return found[0] if found else None


def test_nobody_listens(tmp_path: Path) -> None:
    listener = Listener("127.0.0.1", SECRET, unix=str(tmp_path / "socket"))
    address = listener.address
    listener.close()
    for transport in ("auto", *TRANSPORTS):
        with pytest.raises(ConnectionLost, match="nobody listens"):
            reach(address, transport)
