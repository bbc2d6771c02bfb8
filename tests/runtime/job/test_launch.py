"""The launcher: however a job ends, it is told why, and nothing is left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from paceline import shm
from paceline.errors import DataError, LaunchError, NonFiniteError, PacelineError, RankFailed
from paceline.runtime.job.launch import launch

JOBS = "tests.runtime.job.rank_jobs"
TORCH = ["paceline.runtime.job.rendezvous"]


@pytest.fixture(autouse=True)
def _no_job_around_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    left = [
        p for p in psutil.Process().children(recursive=True) if "paceline.runtime.job.worker" in " ".join(p.cmdline())
    ]
    assert not left


def facts(directory: Path, rank: int) -> dict:
    return json.loads((directory / f"{rank}.json").read_text())


_PATIENCE_S = 300  # with what hangs; far above what the busiest machine needs


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_ranks_meet_at_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    logs = tmp_path / "logs"
    launch(f"{JOBS}:report", str(tmp_path), 3, loaded=TORCH, log_dir=logs, rendezvous=tmp_path / "meet")
    assert_met(tmp_path, 3)
    assert "rank 1 prints" in (logs / "rank-1.log").read_text()
    assert capfd.readouterr().out == "rank 0 prints\n"  # only rank 0 has the terminal


def test_two_jobs_at_once_meet_at_ports_of_their_own(tmp_path: Path):
    def job(name: str) -> None:
        (tmp_path / name).mkdir()
        launch(f"{JOBS}:report", str(tmp_path / name), 2, loaded=TORCH)

    threads = [threading.Thread(target=job, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in "ab":
        assert_met(tmp_path / name, 2)
    assert facts(tmp_path / "a", 0)["port"] != facts(tmp_path / "b", 0)["port"]


def assert_met(directory: Path, size: int) -> None:
    for rank in range(size):
        told = facts(directory, rank)
        assert told["world"] == [rank, size, rank, size, "PACELINE"]
        assert told["sum"] == sum(range(size))
        assert 1 <= int(told["threads"]) <= max(1, (os.cpu_count() or 1) // size)


def test_an_exception_ends_the_job_with_its_traceback(tmp_path: Path):
    with pytest.raises(RankFailed) as failure:
        launch(f"{JOBS}:fail_in_a_collective", "", 3, loaded=TORCH, log_dir=tmp_path)
    message = str(failure.value)
    assert message.startswith("rank 1 of 3 failed:\nTraceback")
    assert 'raise ValueError("the cause")' in message
    assert str(tmp_path / "rank-1.log") in message
    assert "ValueError: the cause" in (tmp_path / "rank-1.log").read_text()


@pytest.mark.parametrize(
    ("job", "kind", "message", "code"),
    [
        ("fail_in_a_collective", DataError, "file x is empty; give another.", 2),
        ("fail", NonFiniteError, "loss is NaN in step 3.", 1),
    ],
)
def test_our_own_errors_come_back_as_they_are(job: str, kind: type[PacelineError], message: str, code: int):
    loaded = TORCH if "collective" in job else []
    with pytest.raises(kind) as failure:
        launch(f"{JOBS}:{job}", "ours", 2, loaded=loaded)
    assert str(failure.value) == message
    assert failure.value.exit_code == code


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("SIGKILL", ["rank 1 of 2 was ended by SIGKILL", "ran out of memory"]),
        ("SIGSEGV", ["rank 1 of 2 was ended by SIGSEGV", "Segmentation fault", "rank_jobs.py"]),
        ("SIGTERM", ["rank 1 of 2 was ended by SIGTERM"]),
        ("exit", ["rank 1 of 2 ended with exit code 7"]),
        ("import", ["rank 1 of 2 failed", "No module named 'no_such_module'"]),
    ],
)
def test_other_ends_are_named(tmp_path: Path, how: str, words: list[str]):
    with pytest.raises(RankFailed) as failure:
        launch(f"{JOBS}:fail", how, 2, rendezvous=tmp_path / "meet")
    for word in words:
        assert word in str(failure.value)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_death_among_exchanges_is_told_rather_than_what_the_others_saw(tmp_path: Path, backend: str, name: str):
    if backend == "shm" and shm.unavailable() is not None:
        pytest.skip(f"no shared memory: {shm.unavailable()}")
    with pytest.raises(RankFailed, match=f"^rank 1 of 3 was ended by {name}"):
        launch(f"{JOBS}:die_in_a_collective", [backend, name], 3, loaded=TORCH, log_dir=tmp_path)


def test_a_rank_that_never_arrives_is_named(tmp_path: Path):
    with pytest.raises(LaunchError, match=r"rank 2 of 3 never arrived within 1 s \(arrived: 0, 1\).*rank-2.log"):
        launch(f"{JOBS}:one_stays_away", "", 3, loaded=TORCH, log_dir=tmp_path)


def test_a_job_that_takes_too_long_says_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    began = time.monotonic()

    def monotonic() -> float:
        """Time passes once both ranks sleep."""
        return time.monotonic() + 3 if all((tmp_path / f"{rank}.pids").exists() for rank in range(2)) else began

    monkeypatch.setattr("paceline.runtime.job.launch.time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    with pytest.raises(LaunchError, match=r"longer than 3 s; still running: ranks 0, 1\.") as error:
        launch(f"{JOBS}:sleep", str(tmp_path), 2, timeout_s=3)
    for told in str(error.value).split(" was at:\n")[1:]:
        assert re.search(r"rank_jobs.py.* in sleep", told)
    assert str(error.value).count(" was at:\n") == 2


def test_a_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use.*MASTER_PORT"):
            launch(f"{JOBS}:report", "", 2, port=port)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use"):
            launch(f"{JOBS}:report", "", 2)


@pytest.mark.parametrize(
    ("module", "is_there"),
    [("tests.runtime.job.quiet", sys.platform == "linux"), ("tests.runtime.job.threaded", False)],
)
def test_what_is_loaded_once_is_there_unless_a_fork_is_not_safe(tmp_path: Path, module: str, is_there: bool):
    launch(f"{JOBS}:tell_loaded", [str(tmp_path), module], 2, loaded=[module])
    assert [facts(tmp_path, rank) for rank in range(2)] == [is_there] * 2


def test_what_cannot_be_loaded_is_told_by_the_ranks_that_need_it(tmp_path: Path):
    launch(f"{JOBS}:tell_loaded", [str(tmp_path), "json"], 2, loaded=["no_such_module"])
    assert facts(tmp_path, 1)
    with pytest.raises(RankFailed, match=r"rank . of 2 failed(.|\n)*No module named 'tests.no_such_jobs'"):
        launch("tests.no_such_jobs:work", "", 2)


def test_no_ranks_are_refused():
    with pytest.raises(LaunchError, match="at least 1"):
        launch(f"{JOBS}:report", "", 0)


class Job:
    """A launcher in a process of its own, to be sent signals."""

    def __init__(self, directory: Path, job: str) -> None:
        self.directory = directory
        loaded = TORCH if "collective" in job else []
        code = f"""if True:
            from pathlib import Path
            from paceline.runtime.job.launch import launch
            launch("{JOBS}:{job}", {str(directory)!r}, 2, loaded={loaded}, rendezvous=Path({str(directory / "meet")!r}))
        """
        self.process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
        files = [directory / f"{rank}.pids" for rank in range(2)]
        until(lambda: all(file.exists() for file in files))
        self.ranks, self.children = [], []
        for file in files:
            rank, *children = (psutil.Process(int(pid)) for pid in file.read_text().split())
            self.ranks.append(rank)
            self.children += children

    def end(self, number: int, *more: int) -> int:
        self.process.send_signal(number)
        for another in more:
            until(lambda: all((self.directory / f"{rank}.told").exists() for rank in range(2)))
            self.process.send_signal(another)
        return self.process.wait(timeout=_PATIENCE_S)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=_PATIENCE_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("job", "numbers", "code"),
    [
        ("wait_in_a_collective", [signal.SIGINT], -signal.SIGINT),
        ("sleep", [signal.SIGTERM], 128 + signal.SIGTERM),
        ("refuse_to_end", [signal.SIGINT, signal.SIGINT], -signal.SIGINT),
    ],
)
def test_a_signal_leaves_no_process_behind(tmp_path: Path, job: str, numbers: list[int], code: int):
    running = Job(tmp_path, job)
    assert running.end(*numbers) == code
    assert_gone(running.ranks + running.children)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_ranks_die_with_a_killed_launcher(tmp_path: Path):
    running = Job(tmp_path, "sleep")
    assert running.end(signal.SIGKILL) == -signal.SIGKILL
    assert_gone(running.ranks)
    for child in running.children:  # whoever starts more processes watches over them
        child.kill()


def test_ranks_may_end_in_good_order_also_where_all_processes_are_told(tmp_path: Path):
    running = Job(tmp_path, "end_in_good_order")
    running.ranks[0].parent().send_signal(signal.SIGINT)
    assert running.end(signal.SIGINT) == -signal.SIGINT
    assert (tmp_path / "0.saved").exists()
    assert (tmp_path / "1.saved").exists()
    assert_gone(running.ranks)
