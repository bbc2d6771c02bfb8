"""A rank is told to end at whatever moment of its start."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from paceline.runtime.job.processes import Processes
from paceline.runtime.job.worker import ARGUMENTS_FILE, LAUNCHER_PID
from paceline.runtime.job.world import JOB_DIRECTORY, LOG_DIRECTORY


def test_a_signal_reaches_a_rank_that_has_no_session_yet(tmp_path: Path):
    given = {"path": sys.path, "loaded": ["tests.runtime.job.late_session"], "arguments": str(tmp_path)}
    (tmp_path / ARGUMENTS_FILE).write_text(json.dumps(given))
    places = {JOB_DIRECTORY: str(tmp_path), LOG_DIRECTORY: str(tmp_path), LAUNCHER_PID: str(os.getpid())}
    running = Processes("tests.runtime.job.rank_jobs:sleep", 1, {**os.environ, **places, "WORLD_SIZE": "1"})
    try:
        while not (tmp_path / "forked").exists():
            time.sleep(0.01)
        running.send(signal.SIGTERM)
        (tmp_path / "go on").touch()
        while running.running and not (tmp_path / "0.pids").exists():
            running.poll()
            time.sleep(0.01)
        assert not running.running and running.ended[0].code == -signal.SIGTERM
    finally:
        running.send(signal.SIGKILL)
        running.close()
