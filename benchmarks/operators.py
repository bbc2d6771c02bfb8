"""`python benchmarks/operators.py [--set KEY=VALUE] [--json FILE]`: the same as `paceline bench operators`."""

from __future__ import annotations

import sys

from paceline.cli.main import app

if __name__ == "__main__":
    app(["bench", "operators", *sys.argv[1:]], prog_name="benchmarks/operators.py")
