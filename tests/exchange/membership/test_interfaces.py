"""Where a coordinator listens."""

import socket
from pathlib import Path

from paceline.exchange.directory import Directory
from paceline.exchange.membership.service import Service
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address
from paceline.exchange.wire.address import bound
from tests.exchange.membership.village import job


def test_it_listens_on_the_interface_that_the_charter_says_and_not_at_the_name_that_others_know(tmp_path: Path) -> None:
    with bound("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    charter = Charter(job(), Terms(2), Address("a-name-that-this-host-does-not-know", port), bind="0.0.0.0")
    directory = Directory(tmp_path / "exchange")
    directory.write(charter)
    service = Service(charter, directory, directory.read_secret())
    service.stop()
    with socket.create_connection(("127.0.0.1", port)):
        service.run()
