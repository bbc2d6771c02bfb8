"""A rank that has been forked and has no session of its own yet, for as long as a test likes."""

import os
import time
from pathlib import Path

from paceline.runtime.job.world import JOB_DIRECTORY

_become_leader = os.setsid


def _setsid() -> None:
    job = Path(os.environ[JOB_DIRECTORY])
    (job / "forked").touch()
    while not (job / "go on").exists():
        time.sleep(0.01)
    _become_leader()


os.setsid = _setsid
