"""`paceline bench`: measure ours against its peers on this machine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import JsonFile
from paceline.cli.output import write_json
from paceline.errors import RecipeError, nearest

# What each name runs: `main(options)` of its room prints a table and returns the object of `--json`.
BENCHES = {
    "data-parallel": "dp and fsdp against serial, DDP, FSDP2 and Accelerate",
    "operators": "split operators against PyTorch's tensor parallelism, DDP and FSDP2",
    "pipelines": "schedules against PyTorch's pipelines and what is possible",
    "models": "families of models, each on many meshes, against its serial module",
    "predictions": "published training runs (--data), predicted beside measured",
    "scaling": "strong and weak scaling, with the fractions of Amdahl and Gustafson that fit",
    "steps": "step time and memory of five models on this machine, predicted beside measured",
    "collectives": "shared memory against Gloo and the memory's copy speed, by size",
    "server": "push and pull of the parameter server against raw limits and its peers",
}

_NAMES = "\n".join(f"- `{name}`: {summary}" for name, summary in BENCHES.items())

HELP = f"""
Measure against other systems, interleaved, on this machine.

```
paceline bench data-parallel --json data-parallel.json
paceline bench collectives --json collectives.json
torchrun --nproc-per-node 8 -m paceline.cli.main bench collectives --set cluster=dgx-h100
paceline bench predictions --data measured_runs.csv --json predictions.json
```

Other work on the machine makes the numbers worthless; the spread that is printed tells.

{_NAMES}
"""


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of those listed above.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the benchmark.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Of predictions: a CSV file of published runs; of collectives: of published bandwidths.",
        ),
    ] = None,
    fit_rows: Annotated[
        str | None,
        typer.Option(
            "--fit-rows",
            metavar="LIST",
            help="Of predictions: fit anew to these lines of the file, as in 2,66-89; a file of them; or none.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure against other systems; `HELP` is what users read."""
    if name not in BENCHES:
        raise RecipeError(f"there is no benchmark '{name}'; known: {', '.join(BENCHES)}.{nearest(name, BENCHES)}")
    options = {key: str(value) for key, value in (("data", data), ("fit_rows", fit_rows)) if value is not None}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not (key and equals):
            raise RecipeError(f"cannot read '--set {setting}'; write KEY=VALUE.")
        options[key] = value
    result = importlib.import_module(f"paceline.bench.{name.replace('-', '_')}.main").main(options)
    if json_file is not None and result:  # of the ranks of a job, only the first has one
        write_json(result, json_file)
