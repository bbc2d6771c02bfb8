"""What the processes of a run are started with: where its coordinator listens, and where others reach it."""

import socket
from pathlib import Path

import pytest

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address
from paceline.train.servers.recipe.section import ServerSection
from paceline.train.servers.supervisor.cluster import charter_for
from paceline.train.servers.supervisor.joining import join_run


def test_servers_of_all_interfaces_are_known_by_the_name_of_their_host(tmp_path: Path) -> None:
    job = Job((DenseTable("w", (8,)),), shards=4)
    charter = charter_for(ServerSection(bind="0.0.0.0"), job, Terms(4), Directory(tmp_path))
    assert (charter.bind, charter.coordinator.host) == ("0.0.0.0", socket.gethostname())
    with pytest.raises(ExchangeError, match=r"cannot listen on 203\.0\.113\.7"):
        charter_for(ServerSection(bind="203.0.113.7"), job, Terms(4), Directory(tmp_path))


def test_a_server_that_joins_from_another_host_is_told_to_say_its_interface(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "name: small\nmodel: {factory: 'package:build'}\ndata: {source: stdlib}\ntrain: {steps: 1, batch: 2}\n"
        "optimizer: {name: SGD}\nserver: {workers: 2}\n"
    )
    job = Job((DenseTable("w", (8,)),), shards=4)
    Directory(tmp_path / "exchange").write(Charter(job, Terms(4), Address("203.0.113.7", 1), bind="203.0.113.7"))
    for more in ({}, {"bind": "203.0.113.8"}):
        with pytest.raises(ExchangeError, match=rf"on {more.get('bind', '203.0.113.7')} .* is told with --bind"):
            join_run(tmp_path, "server", 1, **more)
