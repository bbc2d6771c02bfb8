"""`python benchmarks/data_parallel.py [--set KEY=VALUE] [--json FILE]`: the same as `paceline bench data-parallel`."""

from __future__ import annotations

import sys

from paceline.cli.main import app

if __name__ == "__main__":
    app(["bench", "data-parallel", *sys.argv[1:]], prog_name="benchmarks/data_parallel.py")
