"""Which backend a job gets: the same on all of its ranks, with the reason."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline import shm
from paceline.errors import LaunchError
from paceline.plan import Mesh
from paceline.runtime.job.arrival import noted, roll_call
from paceline.runtime.job.backend import Choice, for_cpus, notes
from paceline.runtime.job.launch import launch
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import Backend, World
from paceline.runtime.peers import connect
from tests.ranks import ranks

ALONE, PAIR = World(1, 2, 0, 1), World(1, 2, 1, 2)


def chosen(choice: str, monkeypatch: pytest.MonkeyPatch, obstacles: list[str | None], worlds: list[World]) -> Backend:
    """What ranks choose that each have an obstacle (or none) and a world."""
    all_notes: dict[str, str] = {}
    for obstacle, world in zip(obstacles, worlds, strict=True):
        monkeypatch.setattr(shm, "unavailable", lambda obstacle=obstacle: obstacle)
        all_notes = {**notes(Choice.parse(choice), world), **all_notes}
    return for_cpus(Choice.parse(choice), all_notes.get)


@pytest.mark.parametrize(
    ("choice", "obstacles", "worlds", "expected"),
    [
        ("auto", [None, None], [PAIR, PAIR], "shm"),
        ("auto", [None, None], [ALONE, PAIR], "shm"),
        ("auto", [None, None], [ALONE, ALONE], "gloo: no two ranks share a host"),
        ("auto", [None, "no memfd."], [PAIR, PAIR], f"gloo: no memfd (host {socket.gethostname()})"),
        ("shm", [None, None], [ALONE, ALONE], "shm"),
        ("gloo", [None, "no memfd."], [PAIR, PAIR], "gloo"),
    ],
)
def test_the_choice(
    choice: str,
    obstacles: list[str | None],
    worlds: list[World],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chosen(choice, monkeypatch, obstacles, worlds) == Backend(expected.partition(":")[0], expected)


def test_shared_memory_asked_for_by_name_is_that_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"'shm' cannot be used: no memfd \(host .*\)\. Choose 'gloo', or 'auto'"):
        chosen("shm", monkeypatch, [None, "no memfd."], [PAIR, PAIR])


def test_unknown_backends_are_told_what_is_known() -> None:
    with (
        pytest.raises(LaunchError, match=r"unknown backend 'glo'; it is one of: auto, shm, gloo.*'gloo'"),
        join(backend="glo"),
    ):
        pass


@ranks(3)
def test_the_first_note_is_everybodys(rank: int, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 3)
    meeting = roll_call(store, World(rank, 3), 20, notes={"of one": "1"} if rank == 1 else {"of two": str(rank)})
    assert noted(store, meeting, "of one") == "1"
    assert noted(store, meeting, "of two") in ("0", "2")
    assert noted(store, meeting, "of none") is None
    found = [None] * 3
    dist.all_gather_object(found, noted(store, meeting, "of two"))
    assert len(set(found)) == 1


@ranks(2)
def test_different_backends_are_told(rank: int, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(LaunchError, match=r"started with '(auto|gloo)' as the backend, others with '(auto|gloo)'"):
        roll_call(store, World(rank, 3), 20, backend=["auto", "gloo"][rank])


@pytest.mark.skipif(shm.unavailable() is not None, reason=f"no shared memory: {shm.unavailable()}")
@ranks(mesh="dp=2,fsdp=2")
def test_by_default_ranks_of_a_host_share_memory_along_every_axis(world: World, mesh: Mesh) -> None:
    assert world.backend.name == "shm"
    assert world.backend.words.startswith("shared memory")
    connect(mesh, torch.device("cpu"), compile=False)
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() == 2]
    assert len(groups) >= 2
    assert {dist.get_backend(group) for group in [*groups, dist.group.WORLD]} == {"shm"}


@ranks(2, backend="gloo")
def test_gloo_by_option(world: World) -> None:
    assert world.backend == Backend("gloo", "gloo")
    assert dist.get_backend() == "gloo"


def test_what_one_host_lacks_all_do_without(tmp_path: Path) -> None:
    job = "tests.runtime.job.rank_jobs:rank_1_has_no_shared_memory"
    launch(job, ["auto", str(tmp_path)], 2)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told == [["gloo", f"gloo: this is a test (host {socket.gethostname()})"]] * 2
    with pytest.raises(LaunchError, match="'shm' cannot be used: this is a test"):
        launch(job, ["shm", str(tmp_path)], 2)
