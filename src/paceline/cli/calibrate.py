"""`paceline calibrate`: measure this machine, and write it down as a cluster."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import Backend, BackendOption, JsonFile
from paceline.cli.output import write_json
from paceline.errors import ClusterError

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.simulator.calibration.calibrate import Calibration


def calibrate(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where the cluster goes; by default beside the cache."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes that compute at once; by default one for each core or GPU.")
    ] = None,
    backend: BackendOption = None,
    json_file: JsonFile = None,
) -> None:
    """Measure this machine in about a minute, and write it as a cluster that plan and simulate read.

    ```
    paceline calibrate
    paceline calibrate -o cluster.yaml --ranks 2
    paceline plan recipes/gpt-stdlib.yaml --cluster cluster.yaml
    ```

    All ranks compute at once, as they do in a step. What this run cannot tell is named; it stays at its default.
    """
    import torch
    from rich.console import Console

    from paceline.bench.machine import cores, machine, warn_of_load
    from paceline.cluster.files import save
    from paceline.simulator.calibration.calibrate import calibrate as measure
    from paceline.simulator.calibration.calibrate import default_path

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    path, on = output or default_path(), machine()
    _writable(path)
    found = measure(
        ranks or gpus or cores(),
        device="cuda" if gpus and (ranks or gpus) <= gpus else "cpu",
        backend=(backend or Backend.AUTO).value,
    )
    save(found.cluster, path)
    if json_file is not None:
        write_json(as_json(found, path), json_file)
    console = Console(stderr=str(json_file) == "-")
    for table in tables(found):
        console.print(table)
    warn_of_load(console, on)
    device = found.device
    console.print(
        f"Not identified by this run, and left at their defaults: {', '.join(device.unidentified) or 'none'}."
    )
    console.print(f"The cluster '{found.cluster.name}' is in {path}; paceline plan and simulate take --cluster {path}")


def _writable(path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterError(f"{path} cannot be written: {error}. Choose another place with -o.") from error
    if path.suffix not in (".yaml", ".yml"):
        raise ClusterError(f"a cluster's file ends in .yaml, which '{path.name}' does not.")


def tables(found: Calibration) -> list[Table]:
    """Return coefficients, what they leave unexplained, and collectives."""
    from rich.table import Table

    device = found.device.device
    coefficients = Table("Coefficient", "Value", "Identified", title=f"{device.name}, {found.findings.ranks} at once")
    for dtype, rate in device.peak.items():
        coefficients.add_row(f"peak {dtype}", f"{rate / 1e9:.3g} GFLOP/s", "best seen")
    coefficients.add_row("bandwidth", f"{device.bandwidth / 1e9:.3g} GB/s", "best seen")
    for name, left in found.device.widths.items():
        value = getattr(device.rates, name)
        coefficients.add_row(name, f"{value:.3g}", "no" if name in found.device.unidentified else f"to {left:.0%}")
    coefficients.add_row("optimizer", f"{device.rates.optimizer:.3g}", "measured")
    misses = Table("Probes", "How many", "Median error", "Worst", "Where", title="Measured over estimated, less 1")
    by_family: dict[str, dict[str, float]] = defaultdict(dict)
    for probe in found.findings.seconds:
        name = f"{probe.name}, {probe.dtype}"
        by_family[probe.family.value][name] = found.device.residuals[name]
    for family, residuals in by_family.items():
        worst = max(residuals, key=lambda name: abs(residuals[name]))
        typical = median(map(abs, residuals.values()))
        misses.add_row(family, str(len(residuals)), f"{typical:.1%}", f"{residuals[worst]:+.1%}", worst)
    links = Table("Collective", "Latency", "Smallest", "Largest", "Worst error of latency + bytes", title="Collectives")
    for kind, link in found.links.items():
        points = found.findings.points[kind]
        (small, quick), (large, slow) = points[0], points[-1]
        links.add_row(
            kind,
            f"{link.latency_s * 1e6:.1f} us",
            f"{small / 1024:g} KiB in {quick * 1e6:.1f} us",
            f"{large / (1 << 20):g} MiB at {large / slow / 1e9:.2f} GB/s",
            f"{max(link.residuals.values(), key=abs):+.0%}",
        )
    return [coefficients, misses, *([links] if found.links else [])]


def as_json(found: Calibration, path: Path) -> dict[str, Any]:
    """Return the object of `--json`."""
    from dataclasses import asdict

    device = found.device
    return {
        "cluster": str(path),
        "ranks": found.findings.ranks,
        "transport": found.findings.transport,
        "device": {
            "name": device.device.name,
            "peak": dict(device.device.peak),
            "bandwidth": device.device.bandwidth,
            "rates": asdict(device.device.rates),
        },
        "unidentified": list(device.unidentified),
        "residuals": dict(device.residuals),
        "links": {
            kind: {"latency_s": link.latency_s, "per_byte_s": link.per_byte_s, "points": found.findings.points[kind]}
            for kind, link in found.links.items()
        },
    }
