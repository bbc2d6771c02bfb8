"""The coordinator of a job: `python -m paceline.exchange.membership DIRECTORY [--anew]`."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import signal
import sys
from pathlib import Path

from paceline.errors import PacelineError
from paceline.exchange.directory import Directory
from paceline.exchange.membership.service import Service, serve


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m paceline.exchange.membership", description=__doc__)
    parser.add_argument("directory", type=Path, help="of the job's exchange")
    parser.add_argument(
        "--anew", action="store_true", help="nobody of before is there any more: begin from the snapshot of the terms"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.register(signal.SIGUSR1)

    def stop_by_signals(service: Service) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.stop())

    try:
        serve(Directory(given.directory), anew=given.anew, ready=stop_by_signals)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
