"""A server of a job: `python -m paceline.exchange.server DIRECTORY`; SIGTERM or SIGINT: leave, shards first."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import signal
import sys
from pathlib import Path

import torch

from paceline.errors import PacelineError
from paceline.exchange.directory import Directory
from paceline.exchange.server.life import Life


def main() -> int:
    """Serve until the job is over, or this server has left."""
    parser = argparse.ArgumentParser(prog="python -m paceline.exchange.server", description=__doc__)
    parser.add_argument("directory", type=Path, help="of the job's exchange")
    parser.add_argument("--bind", help="address of the interface to listen on; what the job says when absent")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)  # it scales by processes
    try:
        life = Life(Directory(given.directory), given.bind)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: life.leave())
        life.run()
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
