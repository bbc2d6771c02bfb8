"""`python benchmarks/a100_profile.py DATA [--draws N]`: the published runs that the profile of the A100 is fitted to.

Without `--draws` it prints their lines, for `paceline bench predictions --fit-rows`. With it, it fits to N choices of
runs in turn, and to one hidden size of those on one host, and prints the median and the worst error on all others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.bench.predictions.a100 import FITTED, TABLE, chosen, draws, of_source, summary
from paceline.bench.predictions.rows import read_rows
from paceline.bench.predictions.samples import samples_of
from paceline.cluster.files import load


def main() -> None:
    """Choose, and print lines or errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--draws", type=int, default=0)
    given = parser.parse_args()
    everything = samples_of(read_rows(given.data).rows).usable
    samples = [sample for source in (*FITTED, TABLE) for sample in of_source(everything, source)]
    if not given.draws:
        print(",".join(str(sample.row.line) for sample in chosen(samples)))
        return
    clusters = {name: load(name) for name in {sample.configuration.cluster for sample in samples}}
    print("| | median of draws | worst |\n|---|---|---|")
    for name, (middle, worst) in summary(draws(samples, clusters, range(given.draws))).items():
        print(f"| {name} | {100 * middle:.1f} % | {100 * worst:.1f} % |")


if __name__ == "__main__":
    main()
