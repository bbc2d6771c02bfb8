"""Ranks find each other, or are told why not."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.errors import LaunchError
from paceline.runtime.job.arrival import roll_call
from paceline.runtime.job.rendezvous import join
from paceline.runtime.job.world import STORE_FILE, World
from tests.ports import free_port
from tests.ranks import ranks
from tests.runtime.job import rank_jobs

ROOT = Path(__file__).parents[3]


@ranks(3)
def test_two_processes_of_one_rank_are_named(rank: int, tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 3)
    with pytest.raises(LaunchError, match=r"two processes claim to be rank 0 of 3: process \d+ on .* and process \d+"):
        roll_call(store, World(rank % 2, 3), 20)


@ranks(2)
def test_different_numbers_of_ranks_are_told(rank: int, tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(LaunchError, match=r"started with '[34]' as the number of ranks, others with '[34]'"):
        roll_call(store, World(rank, 3 + rank), 20)


@ranks(2)
def test_different_devices_are_told(rank: int, tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(LaunchError, match="as the kind of device"):
        roll_call(store, World(rank, 3, device_name=["cpu", "cuda:0"][rank]), 20)


@ranks(2)
def test_ranks_that_never_arrive_are_named(rank: int, tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(LaunchError, match=r"ranks 2, 3 of 4 never arrived within 0.5 s \(arrived: 0, 1\)"):
        rank_jobs.roll_call_of([0, 1], timeout_s=0.5)(store, World(rank, 4), 20)


@ranks(2)
def test_ranks_may_meet_again_at_the_same_store(rank: int, tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    assert [roll_call(store, World(rank, 2), 20) for _ in range(3)] == [0, 1, 2]


@pytest.fixture
def rank_0_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_", "PACELINE_"))]:
        monkeypatch.delenv(name)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def refusal(timeout_s: float = 1) -> str:
    with pytest.raises(LaunchError) as error, join(timeout_s=timeout_s):
        pass
    return str(error.value)


@pytest.mark.usefixtures("rank_0_of_2")
class TestRefusals:
    def test_a_host_without_an_address(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
        assert "'no-such-host.invalid', has no address" in refusal()

    @pytest.mark.parametrize("port", ["", "x", "70000"])
    def test_no_port(self, monkeypatch: pytest.MonkeyPatch, port: str):
        monkeypatch.setenv("MASTER_PORT", port)
        assert f"MASTER_PORT is '{port}'" in refusal()

    def test_nothing_said_about_where_to_meet(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delenv("MASTER_PORT")
        assert "set MASTER_PORT to rank 0's host and a free port" in refusal()

    def test_a_port_in_use(self, monkeypatch: pytest.MonkeyPatch):
        with socket.create_server(("", 0)) as taken:
            port = taken.getsockname()[1]
            monkeypatch.setenv("MASTER_PORT", str(port))
            assert f"cannot listen on port {port}" in refusal()

    def test_nobody_at_the_meeting_point(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("RANK", "1")
        with socket.socket() as silent:  # bound but not listening: refused, and nobody else's meanwhile
            silent.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
            assert "rank 0, which keeps the meeting point 127.0.0.1:" in refusal()

    def test_somebody_else_at_the_meeting_point(self, monkeypatch: pytest.MonkeyPatch):
        with socket.create_server(("127.0.0.1", 0)) as other:
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
            assert "is not rank 0" in refusal(timeout_s=0.2)
        for thread in threading.enumerate():
            if thread.name == "paceline-connect":
                thread.join(10)  # it complains now that the other is gone

    def test_an_unknown_device(self):
        with pytest.raises(LaunchError, match="unknown device 'gpu'; it is one of: auto, cpu, cuda"), join("gpu"):
            pass

    def test_too_few_devices(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        with (
            pytest.raises(LaunchError, match="a GPU for each of the 2 ranks on this host, and there are none"),
            join("cuda"),
        ):
            pass


def test_alone_there_is_no_group(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with join() as world:
        assert (world.rank, world.size, world.device.type) == (0, 1, "cpu")
        assert not dist.is_initialized()


@contextmanager
def started(*commands: tuple[list[str], dict[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Run commands side by side; none outlives the context."""
    around = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**around, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environment in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def torchrun(*options: str) -> list[str]:
    return ["-m", "torch.distributed.run", *options, "-m", "tests.runtime.job.rank_jobs"]


def worlds(directory: Path, size: int) -> list[list]:
    read = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(size)]
    assert all(facts["sum"] == sum(range(size)) for facts in read)
    return [facts["world"] for facts in read]


def test_under_torchrun_on_two_nodes(tmp_path: Path):
    port = str(free_port())
    nodes = [
        torchrun("--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port)
        for node in "01"
    ]
    with started(*(([*node, "report", str(tmp_path)], {}) for node in nodes)) as processes:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    assert worlds(tmp_path, 2) == [[0, 2, 0, 1, "TORCHRUN"], [1, 2, 0, 1, "TORCHRUN"]]
    told = [json.loads((tmp_path / f"{rank}.json").read_text())["backend"] for rank in range(2)]
    assert told == [["gloo", "gloo: no two ranks share a host"]] * 2


def test_under_torchrun_an_error_ends_the_job_although_a_collective_is_under_way(tmp_path: Path):
    options = torchrun("--nproc-per-node", "2", "--master-port", str(free_port()))
    with started(([*options, "report_and_fail", str(tmp_path)], {})) as (process,):
        _, errors = process.communicate(timeout=300)
    assert worlds(tmp_path, 2) == [[0, 2, 0, 2, "TORCHRUN"], [1, 2, 1, 2, "TORCHRUN"]]
    assert process.returncode == 1
    assert "ValueError: the cause" in errors


def test_under_a_scheduler_rank_0_keeps_the_meeting_point(tmp_path: Path):
    ranks(2, joined=False)(_report_as_a_task)(directory=tmp_path, port=free_port())
    assert worlds(tmp_path, 2) == [[0, 2, 0, 2, "SLURM"], [1, 2, 1, 2, "SLURM"]]


def _report_as_a_task(rank: int, directory: Path, port: int) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", STORE_FILE):
        del os.environ[name]
    task = {"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    os.environ.update(task, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rank_jobs.report(str(directory))
