"""Processes forked from one that has loaded PyTorch: they take signals from their first moment, and end with it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.forked import Forked

PATIENCE_S = 300
"""Only what hangs takes so long."""


def said(folder: Path, scene: str) -> list[str]:
    """Have `nursed` do a scene; return what it said."""
    output = folder / "said"
    program = Forked("tests.train.servers.nursed", scene, folder / "logs", output=output)
    try:
        code = program.wait(PATIENCE_S)
        assert code == 0, output.read_text() if output.exists() else "it said nothing"
    finally:
        program.kill()
    return output.read_text().splitlines()


def test_who_has_a_childs_number_can_end_it(tmp_path: Path) -> None:
    """A signal that came before the child was a process of its own went nowhere, and who waited for its end hung."""
    assert said(tmp_path, "at once") == ["-15"]


def test_children_end_with_the_nursery_and_who_wants_another_is_told_why(tmp_path: Path) -> None:
    began, ended, words = said(tmp_path, "gone")
    pid, code = began.split()
    assert (code, ended) == ("None", "-9") and "was killed; perhaps the host ran out of memory" in words
    deadline = time.monotonic() + PATIENCE_S
    while there(int(pid)):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def there(pid: int) -> bool:
    """Whether a process has not ended; nobody may have asked how it did."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
