"""Listeners and those who connect: who is let in, by which way, and what is left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConnectionLost, ExchangeError
from paceline.exchange.view import Address
from paceline.exchange.wire.connect import connect
from paceline.exchange.wire.frame import Connection, Frame
from paceline.exchange.wire.gathering import Gathering
from paceline.exchange.wire.listen import Listener
from paceline.exchange.wire.opening import Opening
from paceline.exchange.wire.shared import SharedConnection
from paceline.exchange.wire.sockets import SocketConnection
from paceline.exchange.wire.striped import StripedConnection, divided
from tests.exchange.wire.pairs import SECRET, TRANSPORTS, echo, pair, reach


def kind_of(connection: Connection) -> tuple[type, int]:
    with connection._socket as sock:  # type: ignore[attr-defined]
        return type(connection), sock.family


@pytest.fixture
def listener(tmp_path: Path):
    made = Listener("127.0.0.1", SECRET, unix=str(tmp_path / "socket"), timeout_s=2)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        ("auto", (SharedConnection, socket.AF_UNIX)),
        ("shared", (SharedConnection, socket.AF_UNIX)),
        ("unix", (SocketConnection, socket.AF_UNIX)),
        ("tcp", (SocketConnection, socket.AF_INET)),
    ],
)
def test_the_transport_is_the_one_asked_for_or_the_best(listener: Listener, transport: str, kind: object) -> None:
    client = connect(listener.address, SECRET, transport=transport)
    server = listener.accept()
    assert kind_of(client) == kind_of(server) == kind
    client.close()
    server.close()


def test_several_streams_are_one_connection(listener: Listener) -> None:
    client = reach(listener.address, "tcp*3")
    server = listener.accept()
    assert kind_of(client) == kind_of(server) == (StripedConnection, socket.AF_INET)
    client.close()
    server.close()


def test_on_another_host_it_is_tcp(listener: Listener) -> None:
    client = connect(replace(listener.address, machine="another"), SECRET)
    assert kind_of(client) == (SocketConnection, socket.AF_INET)
    client.close()


def test_where_the_path_is_gone_it_is_tcp(listener: Listener) -> None:
    os.unlink(listener.address.unix)
    client = connect(listener.address, SECRET)
    assert kind_of(client) == (SocketConnection, socket.AF_INET)
    client.close()


@pytest.mark.parametrize("transport", ["shared", "unix"])
def test_what_needs_one_host_is_refused_on_another(listener: Listener, transport: str) -> None:
    with pytest.raises(ExchangeError, match="choose auto or tcp"):
        connect(replace(listener.address, machine="another"), SECRET, transport=transport)


def test_streams_of_a_connection_that_is_not_completed_are_given_up() -> None:
    gathering = Gathering(0.05)
    ends = [socket.socketpair() for _ in range(3)]
    assert gathering.add(ends[0][0], Opening(False, 0, 2, b"a" * 16)) is None
    with pytest.raises(ExchangeError, match="does not fit"):
        gathering.add(ends[1][0], Opening(False, 0, 2, b"a" * 16))
    time.sleep(0.1)
    assert gathering.add(ends[2][0], Opening(False, 1, 2, b"b" * 16)) is None
    assert ends[0][1].recv(1) == b""
    gathering.close()
    assert ends[2][1].recv(1) == b""
    for ours, theirs in ends:
        ours.close()
        theirs.close()


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), parts=st.integers(1, 7))
def test_memory_is_divided_evenly_and_in_order(sizes: list[int], parts: int) -> None:
    data = [bytes([index]) * size for index, size in enumerate(sizes)]
    cut = divided([memoryview(one) for one in data], parts)
    assert b"".join(piece for part in cut for piece in part) == b"".join(data)
    counts = [sum(map(len, part)) for part in cut]
    assert len(counts) == parts and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("streams", [0, 65])
def test_streams_are_few(listener: Listener, streams: int) -> None:
    with pytest.raises(ExchangeError, match="1 to 64"):
        connect(listener.address, SECRET, streams=streams)


def test_an_unknown_transport_is_named_with_the_nearest(listener: Listener) -> None:
    with pytest.raises(ExchangeError, match="Did you mean 'shared'"):
        connect(listener.address, SECRET, transport="shard")


def test_a_listener_without_tcp_is_not_reached_from_elsewhere(tmp_path: Path) -> None:
    listener = Listener("", SECRET, unix=str(tmp_path / "socket"))
    with pytest.raises(ExchangeError, match="does not listen on TCP"):
        connect(replace(listener.address, machine="another"), SECRET)
    connect(listener.address, SECRET).close()
    listener.close()


class Heard(logging.Handler):
    """Hears of strangers, whenever the thread that met them says so."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.stranger = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "stranger" in record.getMessage():
            self.stranger.set()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_has_another_secret_is_told_and_turned_away(listener: Listener, transport: str) -> None:
    log, heard = logging.getLogger("paceline.exchange.wire.listen"), Heard()
    log.addHandler(heard)
    try:
        with pytest.raises(ExchangeError, match="PACELINE_SECRET"):
            connect(listener.address, b"another", transport=transport.partition("*")[0])
        assert heard.stranger.wait(60)
    finally:
        log.removeHandler(heard)
    reach(listener.address, transport).close()
    listener.accept().close()


def test_silent_strangers_hold_up_nobody(listener: Listener) -> None:
    address = listener.address
    strangers = [socket.create_connection((address.host, address.port)) for _ in range(200)]
    client = connect(address, SECRET, transport="tcp", timeout_s=5)
    listener.accept().close()
    client.close()
    for stranger in strangers:
        stranger.settimeout(10)
        assert stranger.recv(1) == b""  # each is let go
        stranger.close()


def test_who_speaks_another_language_is_turned_away(listener: Listener) -> None:
    with socket.create_connection((listener.address.host, listener.address.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_silent_server_is_given_up() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConnectionLost, match="did not introduce itself"),
    ):
        connect(Address("127.0.0.1", silent.getsockname()[1]), SECRET, timeout_s=0.2)


def test_close_wakes_who_accepts(listener: Listener) -> None:
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(listener.accept) for _ in range(2)]
        time.sleep(0.05)
        listener.close()
        assert all(isinstance(one.exception(10), ConnectionLost) for one in waiting)


def test_who_was_let_in_and_never_accepted_is_let_go(listener: Listener) -> None:
    client = connect(listener.address, SECRET, transport="unix")
    time.sleep(0.1)
    listener.close()
    with pytest.raises(ConnectionLost):
        client.receive()
    client.close()


def test_only_loopback_hears(listener: Listener) -> None:
    assert listener.address.host == "127.0.0.1"
    assert os.stat(listener.address.unix).st_mode & 0o777 == 0o600


def test_a_listener_leaves_nothing_behind(tmp_path: Path) -> None:
    for path in (tmp_path / "socket", tmp_path / ("long" * 30) / "socket"):
        listener = Listener("", SECRET, unix=str(path))
        used = Path(listener.address.unix)
        connect(listener.address, SECRET, transport="shared").close()
        listener.close()
        listener.close()
        assert not used.exists()
    assert not used.parent.exists()


def test_the_socket_of_one_who_was_killed_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    Listener("", SECRET, unix=str(path)).close()


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(ExchangeError, match="cannot listen"):
        Listener("", SECRET, unix=str(path))
    assert path.read_text() == "mine"


def test_a_port_in_use_is_named(listener: Listener) -> None:
    with pytest.raises(ExchangeError, match=str(listener.address.port)):
        Listener("127.0.0.1", SECRET, port=listener.address.port)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_connections_leave_nothing(transport: str, tmp_path: Path) -> None:
    process = psutil.Process()
    listener = Listener("127.0.0.1", SECRET, unix=str(tmp_path / "socket"))
    frame = Frame(1, tensors=[torch.ones(50_000)])

    def connections(count: int) -> None:
        for _ in range(count):
            client = reach(listener.address, transport)
            server = listener.accept()
            client.send(frame)
            assert server.receive().tensors[0][-1] == 1
            client.close()
            server.close()

    connections(20)
    files, maps, memory = process.num_fds(), len(process.memory_maps(grouped=False)), process.memory_info().rss
    connections(200)  # of 200 kB each: one of them that stays is 40 MB
    assert process.num_fds() <= files
    assert len(process.memory_maps(grouped=False)) <= maps + 20
    assert process.memory_info().rss < memory + (16 << 20)
    assert threading.active_count() < 20
    listener.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_threads_send(transport: str, tmp_path: Path) -> None:
    frames = 50

    def sender(worker: int) -> None:
        for sequence in range(frames):
            size = (sequence * 7919) % 50_000
            client.send(
                Frame(1, worker=worker, sequence=sequence, tensors=[torch.full((size,), worker * 100 + sequence)])
            )

    with pair(transport, tmp_path) as (client, server), ThreadPoolExecutor(4) as threads:
        sent = [threads.submit(sender, worker) for worker in range(4)]
        seen: dict[int, int] = dict.fromkeys(range(4), 0)
        for _ in range(4 * frames):
            frame = server.receive()
            assert frame.sequence == seen[frame.worker]
            assert bool((frame.tensors[0] == frame.worker * 100 + frame.sequence).all())
            assert frame.tensors[0].numel() == (frame.sequence * 7919) % 50_000
            seen[frame.worker] += 1
        for one in sent:
            one.result(10)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sizes_may_rise_and_fall(transport: str, tmp_path: Path) -> None:
    with pair(transport, tmp_path) as (client, server), echo(server):
        for size in (10, 3_000_000, 20_000, 5_000_000, *(9_000, 100_000) * 70, 4_000_000):
            client.send(Frame(1, tensors=[torch.full((size,), float(size))]))
            got = client.receive().tensors[0]
            assert got.shape == (size,) and bool((got == size).all())


def test_shared_memory_that_is_not_needed_is_given_back(tmp_path: Path) -> None:
    with pair("shared", tmp_path) as (client, server), echo(server):

        def round_trip(count: int) -> None:
            client.send(Frame(1, tensors=[torch.ones(count)]))
            client.receive()

        round_trip(64 << 20 >> 2)
        large = [segment._touched for segment in client._segments]  # type: ignore[attr-defined]
        for _ in range(150):
            round_trip(50_000)
        small = [segment._touched for segment in client._segments]  # type: ignore[attr-defined]
    assert max(large) >= 64 << 20
    assert max(small) < 1 << 20
