"""Frames in native code: the bytes that Python makes, read however they arrive."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.wire import choice
from paceline.exchange.wire.build import BuildError, native
from paceline.exchange.wire.codec import TYPES, encoded
from paceline.exchange.wire.frame import Frame, Meta
from paceline.exchange.wire.guarded import CountedUsers, Users
from paceline.exchange.wire.sockets import SocketConnection

FRAMES = [
    Frame(0),
    Frame(65535, -(2**63), 2**63 - 1, 1, 2, -1, float("nan"), np.arange(5), "Grüße \0", [torch.tensor(2.5)]),
    Frame(3, tensors=[torch.arange(6).view(2, 3).to(dtype) for dtype in TYPES]),
    Frame(4, tensors=[torch.empty(0, 7), torch.ones(2, 0, 3), torch.ones(3, requires_grad=True)]),
    Frame(5, numbers=np.arange(10)[::2], tensors=[torch.arange(12.0).view(3, 4).t(), torch.arange(9)[3:7]]),
    Frame(6, tensors=[torch.complex(torch.ones(2), torch.ones(2)).conj().imag]),
    Frame(7, numbers=np.arange(3, dtype=np.int32), tensors=(torch.arange(100_000.0),)),
]
"""What is usual, and what native code leaves to Python."""


def raw(frame: Frame) -> bytes:
    first, views = encoded(frame)
    return b"".join([first, *views])


def joined() -> tuple[SocketConnection, socket.socket]:
    ours, theirs = socket.socketpair()
    connection = SocketConnection(ours)
    assert connection._wire is not None
    return connection, theirs


@pytest.mark.parametrize("frame", FRAMES, ids=[str(frame.kind) for frame in FRAMES])
def test_the_bytes_are_those_of_python(frame: Frame) -> None:
    connection, theirs = joined()
    sent: list[bytes] = []
    with theirs:
        reader = threading.Thread(target=lambda: sent.append(theirs.makefile("rb").read()))
        reader.start()
        connection.send(frame)
        connection.close()
        reader.join(20)
    assert sent == [raw(frame)]
    assert connection.sent_bytes == len(sent[0])


@pytest.mark.parametrize("piece", [1, 71, 1000, 10**6])
def test_frames_are_read_however_they_arrive(piece: int) -> None:
    """Byte by byte, and several at once: what was read ahead is of the next."""
    frames = [FRAMES[2], FRAMES[0], FRAMES[1], FRAMES[5], FRAMES[4], FRAMES[0]]
    data = b"".join(map(raw, frames))
    connection, theirs = joined()
    with theirs:
        pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
        writer = threading.Thread(target=lambda: [theirs.sendall(part) for part in pieces])
        writer.start()
        for frame in frames:
            assert raw(connection.receive()) == raw(frame)
        writer.join(20)
    assert connection.received_bytes == len(data)
    connection.close()


def some_frames(random: Random) -> list[Frame]:
    """Frames of few kinds, so that some are like the one before."""

    def tensor() -> Tensor:
        count = random.choice([0, 1, 7, 100, 1000, 9000])
        dtype = random.choice([torch.uint8, torch.int16, torch.int64, torch.float32])
        return torch.arange(count).to(dtype)

    return [
        Frame(
            number,
            numbers=np.arange(random.choice([0, 0, 3, 3, 700])),
            text=random.choice(["", "", "a little text"]),
            tensors=[tensor() for _ in range(random.choice([0, 1, 2, 2, 2, 5]))],
        )
        for number in range(100)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_what_was_read_ahead_is_of_whom_it_belongs_to(seed: int) -> None:
    """Frames that are guessed right and wrong, in pieces of any size, into memory of either end."""
    random = Random(seed)
    frames = some_frames(random)
    data = b"".join(map(raw, frames))
    connection, theirs = joined()

    def write() -> None:
        at = 0
        while at < len(data):
            count = random.choice([1, 71, 73, 4096, 20_000, 300_000])
            theirs.sendall(data[at : at + count])
            at += count

    with theirs:
        writer = threading.Thread(target=write)
        writer.start()
        for frame in frames:
            places = [torch.full_like(tensor, 77) for tensor in frame.tensors]
            wants = frame.kind % 3 == 0
            received = connection.receive(lambda _, metas, wants=wants, places=places: places if wants else None)
            assert raw(received) == raw(frame)
            assert all(tensor.data_ptr() % 64 == 0 for tensor in received.tensors if not wants and len(tensor))
        writer.join(20)
    assert connection.received_bytes == len(data)
    connection.close()


@pytest.mark.parametrize("data", [raw(FRAMES[2]), raw(FRAMES[0])], ids=["tensors", "none"])
def test_a_frame_that_ends_early_after_one_like_it_is_a_lost_connection(data: bytes) -> None:
    for cut in range(1, len(data)):
        connection, theirs = joined()
        with theirs:
            theirs.sendall(raw(FRAMES[2]) + data[:cut])
        assert raw(connection.receive()) == raw(FRAMES[2])
        with pytest.raises(ConnectionLost):
            connection.receive()


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_frame_after_one_like_it_is_an_error_or_another_frame(seed: int) -> None:
    random = Random(seed)
    connection, theirs = joined()
    changed = bytearray(raw(FRAMES[2]))
    for _ in range(random.choice([1, 1, 2, 8])):
        changed[random.randrange(len(changed))] = random.randrange(256)
    with theirs:
        theirs.sendall(raw(FRAMES[2]) * 2)
        connection.receive()
        connection.receive()
        theirs.sendall(changed + raw(FRAMES[1]))
    with contextlib.suppress(ExchangeError, ConnectionLost):
        for _ in range(3):
            connection.receive()
    connection.close()


def test_places_are_those_of_the_receiver_or_refused() -> None:
    connection, theirs = joined()
    frame = Frame(1, tensors=[torch.arange(6.0).view(2, 3), torch.arange(3)])
    places = [torch.empty(6), torch.empty(3, dtype=torch.int64)]
    metas: list[Meta] = []
    with theirs:
        theirs.sendall(raw(frame) * 2)
        received = connection.receive(lambda _, given: metas.extend(given) or places)
        assert metas == [Meta(torch.float32, (2, 3)), Meta(torch.int64, (3,))]
        assert [tensor.data_ptr() for tensor in received.tensors] == [place.data_ptr() for place in places]
        assert torch.equal(places[0], torch.arange(6.0))
        with pytest.raises(ExchangeError, match=r"tensor 1 of a frame is torch\.int64"):
            connection.receive(lambda *_: [torch.empty(6), torch.empty(3)])


def test_memory_is_taken_again_and_given_back() -> None:
    connection, theirs = joined()
    large, small = Frame(1, tensors=[torch.ones(100_000)]), Frame(1, tensors=[torch.arange(5.0), torch.arange(7)])
    with theirs:
        writer = threading.Thread(target=lambda: [theirs.sendall(raw(frame)) for frame in [large] * 2 + [small] * 200])
        writer.start()
        first = connection.receive().tensors[0]
        assert connection.receive().tensors[0].data_ptr() == first.data_ptr()
        for _ in range(200):
            received = connection.receive().tensors
            assert torch.equal(received[0], torch.arange(5.0)) and torch.equal(received[1], torch.arange(7))
        writer.join(20)
    assert received[0].untyped_storage().nbytes() < first.nbytes
    connection.close()


@pytest.mark.parametrize("make", [CountedUsers, lambda: native().Users()], ids=["python", "native"])
def test_a_socket_is_closed_by_the_last_who_uses_it(make: Callable[[], Users]) -> None:
    users = make()
    assert users.enter() and users.enter()
    assert not users.leave()
    assert users.end() == (True, False)
    assert users.end() == (False, False)
    assert not users.enter()
    assert users.leave()
    assert make().end() == (True, True)


def test_a_connection_that_was_closed_says_so_by_name() -> None:
    connection, theirs = joined()
    with theirs:
        connection.close()
        for use in (connection.receive, lambda: connection.send(FRAMES[0])):
            with pytest.raises(ConnectionLost, match="the connection to a peer is closed"):
                use()


def test_a_frame_of_another_class_is_left_to_python() -> None:
    class Other(Frame):
        pass

    connection, theirs = joined()
    with theirs:
        connection.send(Other(3, text="other"))
        assert theirs.recv(1000) == raw(Frame(3, text="other"))
    connection.close()


def test_python_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(choice, "native", broken)
    chosen = choice.chosen.__wrapped__
    with pytest.warns(UserWarning, match=r"in Python, slower .* no C\+\+ compiler"):
        assert chosen() is None
    monkeypatch.setenv(choice.CHOICE, "native")
    with pytest.raises(ExchangeError, match="PACELINE_WIRE is native, and"):
        chosen()
    monkeypatch.setenv(choice.CHOICE, "portable")
    assert chosen() is None
    monkeypatch.setenv(choice.CHOICE, "nativ")
    with pytest.raises(ExchangeError, match="Did you mean 'native'"):
        chosen()
