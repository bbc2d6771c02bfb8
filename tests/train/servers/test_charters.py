"""What the processes of a run are started with: where its coordinator listens, and where others reach it."""

import socket
from pathlib import Path

import pytest

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.terms import Terms
from paceline.train.servers.recipe.section import ServerSection
from paceline.train.servers.supervisor.cluster import charter_for


def test_servers_of_all_interfaces_are_known_by_the_name_of_their_host(tmp_path: Path) -> None:
    job = Job((DenseTable("w", (8,)),), shards=4)
    charter = charter_for(ServerSection(bind="0.0.0.0"), job, Terms(4), Directory(tmp_path))
    assert (charter.bind, charter.coordinator.host) == ("0.0.0.0", socket.gethostname())
    with pytest.raises(ExchangeError, match=r"cannot listen on 203\.0\.113\.7"):
        charter_for(ServerSection(bind="203.0.113.7"), job, Terms(4), Directory(tmp_path))
