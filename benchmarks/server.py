"""`python benchmarks/server.py [--set KEY=VALUE] [--json FILE]`: the same as `paceline bench server`."""

from __future__ import annotations

import sys

from paceline.cli.main import app

if __name__ == "__main__":
    app(["bench", "server", *sys.argv[1:]], prog_name="benchmarks/server.py")
