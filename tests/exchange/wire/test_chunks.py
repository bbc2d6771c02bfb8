"""Large tensors through shared memory, chunk by chunk."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConnectionLost
from paceline.exchange.wire import chunks
from paceline.exchange.wire.chunks import Part, await_all, chunk_count, chunked, give, take


@given(counts=st.lists(st.integers(0, 3 * chunks.CHUNK_BYTES), max_size=6))
def test_chunks_are_all_of_it_in_order(counts: list[int]) -> None:
    made = list(chunked(counts))
    assert len(made) == chunk_count(sum(counts))
    sizes = [sum(part.end - part.begin for part in chunk) for chunk in made]
    assert all(size == chunks.CHUNK_BYTES for size in sizes[:-1])
    at = [0] * len(counts)
    last = 0
    for part in (part for chunk in made for part in chunk):
        assert part.piece >= last and part.begin == at[part.piece] < part.end
        at[part.piece], last = part.end, part.piece
    assert at == counts


def test_a_chunk_has_parts_of_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10)
    assert list(chunked([4, 0, 9, 10])) == [
        [Part(0, 0, 4), Part(2, 0, 6)],
        [Part(2, 6, 9), Part(3, 0, 7)],
        [Part(3, 7, 10)],
    ]


def test_nothing_is_read_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is copied on once it is told, and no byte of what follows is heard."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10)
    source, shared, out = bytearray(range(25)), bytearray(25), bytearray(25)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = threading.Thread(target=take, args=(theirs, [memoryview(out)], [memoryview(shared)]))
        reader.start()
        shared[:10] = source[:10]
        ours.sendall(b"\1")
        shared[10:] = source[10:]
        ours.sendall(b"\1\1next")
        reader.join(20)
        assert out == source
        assert theirs.recv(10) == b"next"


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_given_is_taken(asked: bool) -> None:
    source = memoryview(bytearray(range(256)) * 40_000)
    shared, out = memoryview(bytearray(len(source))), memoryview(bytearray(len(source)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = threading.Thread(target=take, args=(theirs, [out[:99], out[99:]], [shared[:99], shared[99:]]))
        reader.start()
        give(ours, [shared[:99], shared[99:]], [source[:99], source[99:]], lambda: asked)
        reader.join(20)
        assert out == source
        give(ours, [shared], [source], lambda: asked)
        await_all(theirs, len(source))


def test_chunks_are_told_of_from_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10)
    source = memoryview(bytes(range(45)))
    ours, theirs = socket.socketpair()
    told: list[int] = []

    def asked() -> bool:
        told.append(theirs.recv(100, socket.MSG_DONTWAIT).count(1) if len(told) > 1 else 0)
        return len(told) in (2, 3, 4)

    with ours, theirs:
        give(ours, [memoryview(bytearray(45))], [source], asked)
        assert told == [0, 0, 2, 1, 1]
        assert theirs.recv(100) == b"\1"


def test_who_waits_hears_that_the_peer_is_gone() -> None:
    ours, theirs = socket.socketpair()
    memory = memoryview(bytearray(3 * chunks.CHUNK_BYTES))
    with theirs:
        ours.sendall(b"\1")
        ours.close()
        with pytest.raises(ConnectionLost, match="in the middle"):
            await_all(theirs, len(memory))
        with pytest.raises(ConnectionLost, match="in the middle"):
            take(theirs, [memory], [memory])
