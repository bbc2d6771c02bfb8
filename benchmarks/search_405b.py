"""All layouts of a Llama of 405 billion parameters on 16,384 H100: seconds of the processor, and peak memory.

python benchmarks/search_405b.py
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace

from paceline.cluster.files import load
from paceline.planner.search.fitting import fitting
from paceline.planner.search.question import question
from paceline.planner.search.ranking import search
from paceline.simulator.closed_form.estimate import estimate
from paceline.simulator.closed_form.transformer import transformer

DEVICES, BATCH = 16384, 2048


def main() -> None:
    """Print a line for each part of the search."""
    llama = transformer(
        layers=126,
        hidden=16384,
        heads=128,
        kv_heads=8,
        ffn=53248,
        gated=True,
        biases=False,
        tied=False,
        sequence=8192,
        vocabulary=128256,
        name="llama-405b",
    )
    cluster = load("dgx-h100")
    cluster = replace(cluster, groups=(replace(cluster.groups[0], devices=DEVICES),))
    began = time.process_time()
    asked = question(llama, cluster, batch=BATCH)
    found = fitting(asked)
    print(f"{found.considered} layouts, of which {len(found.layouts)} fit: {time.process_time() - began:.2f} s")
    estimate(llama, found.layouts, cluster)
    print(f"these estimated, all in all: {time.process_time() - began:.2f} s")
    began = time.process_time()
    best = search(llama, cluster, batch=BATCH).plans[0]
    print(f"the whole search, its best 50 simulated: {time.process_time() - began:.2f} s")
    print(f"the best: {best.mesh}, {best.schedule}, {best.step_s:.2f} s, {best.mfu:.1%} of the peak")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
