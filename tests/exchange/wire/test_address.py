"""Interfaces of TCP: which can be had, and by what name others reach them."""

import socket

import pytest

from paceline.errors import ExchangeError
from paceline.exchange.wire.address import bound, reachable


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1", "localhost", "0.0.0.0"])
def test_an_interface_of_this_host_can_be_had(bind: str) -> None:
    if bind == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this system has no IPv6")
    with bound(bind, 0) as sock:
        sock.listen()
        with socket.create_connection(("127.0.0.1" if bind == "0.0.0.0" else bind, sock.getsockname()[1])):
            pass


def test_what_cannot_be_had_is_said_with_what_to_give_instead() -> None:
    with pytest.raises(ExchangeError, match=r"cannot listen on 203\.0\.113\.7 port 0: .*an interface of this host"):
        bound("203.0.113.7", 0)  # of no host: RFC 5737
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ExchangeError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            bound("127.0.0.1", port)


def test_others_reach_all_interfaces_by_the_name_of_the_host() -> None:
    assert [reachable(bind) for bind in ("0.0.0.0", "::", "10.1.2.3")] == [*[socket.gethostname()] * 2, "10.1.2.3"]
