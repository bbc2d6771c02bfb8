"""Published bus bandwidths beside what described clusters expect: `paceline bench collectives --data FILE`.

A row says on what hardware a collective of some bytes ran among some GPUs. Which cluster that is, is read off its
words. Rows to which the clusters' figures were fitted are told apart; only the others are judged.
"""

from __future__ import annotations

import csv
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from paceline.bench.machine import table_console
from paceline.cluster.cluster import Cluster
from paceline.cluster.collectives import collective_seconds
from paceline.cluster.files import load
from paceline.errors import RecipeError

MIB = float(1 << 20)
_LARGE = 8192 * MIB
"""What is taken for rows that say only that messages were large."""
_KINDS = {"alltoall": "all_to_all", "all_reduce": "all_reduce", "all_gather": "all_gather"}
_KINDS |= {"reduce_scatter": "reduce_scatter"}
_BANDS = {"below 16 MiB": (0.0, 16 * MIB), "to 256 MiB": (16 * MIB, 256 * MIB), "above": (256 * MIB, float("inf"))}

# The first whose words are all in the hardware's name; whether hosts of several are meant.
_CLUSTERS = (
    (("A100", "4x200"), True, "vtrain-a100"),
    (("A100", "8x200"), True, "dgx-a100"),
    (("A100",), False, "dgx-a100"),
    (("H100", "RoCE"), True, "roce-h100"),
    (("H100", "8x400"), True, "dgx-h100"),
    (("H100", "IB"), True, "dgx-h100"),
    (("H100",), False, "dgx-h100"),
    (("H200",), False, "h200"),
    (("H200",), True, "h200"),
    (("GB200",), True, "gb200-nvl72"),
    (("GB300",), True, ""),
    (("B200",), False, "b200"),
    (("B200",), True, "b200"),
    (("V100", "NVLink2"), False, "v100-25gbe"),
)
# Source, hardware, ranks and sizes in MiB of the rows to which figures of the clusters were fitted.
_FITTED = (
    ("vTrain", "A100", (2, 4, 8), (1, 4, 16, 64, 256, 1024)),
    ("ND_A100_v4", "A100", (8,), (1 / 64, 1, 4, 16, 64, 256)),
    ("vTrain", "V100", (8,), (1, 4, 16, 64, 256, 1024)),
    ("vTrain", "V100", (2, 3, 4, 5, 6, 7), (1, 1024)),
    ("dgxc-benchmarking", "H100", (8,), (1 / 64, 1 / 4, 1, 4, 16, 64, 256, 1024)),
    ("autoparallel", "H100", (2, 4, 8), (1024,)),
    ("ml-engineering", "B200", (8,), (1 / 4, 1, 4, 16, 64, 256, 1024, 16384)),
    ("ml-engineering", "B200", (4,), (8192,)),
    ("nccl-tests/issues/152", "A100", (16,), (1024,)),
    ("GTC", "", tuple(range(1, 1024)), (_LARGE / MIB,)),
)
_FAULTS = ("LOW", "complaint", "a bit low", "AG far below", "after raising")
_MODELLED = ("NOT a measurement", "tuner value", "0-byte", "fitted points")


@dataclass(frozen=True)
class Published:
    """A row that can be judged.

    Attributes:
        line: of the file.
        source, hardware: as the row has them.
        cluster: that it ran on, without sums in switches where the row says so.
        kind, ranks, nbytes: of the collective.
        seconds: that it took.
        fitted: figures of the cluster were fitted to it.
    """

    line: int
    source: str
    hardware: str
    cluster: Cluster
    kind: str
    ranks: int
    nbytes: float
    seconds: float
    fitted: bool

    @property
    def expected(self) -> float:
        """Seconds that the cluster expects."""
        cluster = self.cluster.of(max(self.ranks, self.cluster.devices_per_host))
        return float(collective_seconds(cluster, self.kind, self.nbytes, self.ranks, 1))

    @property
    def error(self) -> float:
        """Expected over measured, less 1."""
        return self.expected / self.seconds - 1


def read(path: Path) -> tuple[list[Published], Counter[str]]:
    """Return the rows that can be judged, and why others cannot, with their number.

    Raises:
        RecipeError: the file cannot be read or is of another form.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}.") from error
    needed = {"source", "hardware", "nodes", "gpus", "collective", "bytes", "busbw_gbps", "notes"}
    if not rows or not needed <= set(rows[0]):
        missing = ", ".join(sorted(needed - set(rows[0] if rows else ())))
        raise RecipeError(f"{path} is no table of collectives: it has no column {missing}.")
    found, left_out = [], Counter[str]()
    for line, row in enumerate(rows, start=2):
        judged = _row(line, row)
        if isinstance(judged, str):
            left_out[judged] += 1
        else:
            found.append(judged)
    return found, left_out


def _row(line: int, row: Mapping[str, str]) -> Published | str:
    """Return a row, or why it cannot be judged."""
    notes, kind = row["notes"] or "", _KINDS.get(row["collective"])
    if kind is None:
        return "another kind of figure than a collective's"
    if any(word in notes for word in _MODELLED):
        return "a tuner's table, not a measurement"
    if any(word in notes for word in _FAULTS):
        return "reported as a fault"
    if "nvlstree" in notes or ("SHARP" in row["hardware"] and "RDMA" in row["hardware"]):
        return "an algorithm that the cluster's description does not choose"
    if not row["gpus"] or float(row["busbw_gbps"] or 0) <= 0:
        return "no number of GPUs or no bandwidth"
    if not row["bytes"] and "large" not in notes:
        return "no size"
    cluster = _cluster(row["hardware"], row["nodes"] not in ("", "1") or int(row["gpus"]) > 8)
    if cluster is None:
        return "hardware that no shipped cluster describes"
    if any(word in notes for word in ("NVLS_ENABLE=0", "NVLS off")) or row["hardware"].endswith(("NVLink4", "NVLink5")):
        cluster = cluster if "NVLS" in notes and "off" not in notes and "=0" not in notes else _without_sums(cluster)
    ranks, nbytes = int(row["gpus"]), float(row["bytes"] or _LARGE)
    passes = 2 if kind == "all_reduce" else 1
    seconds = passes * (ranks - 1) / ranks * nbytes / (float(row["busbw_gbps"]) * 1e9)
    fitted = _is_fitted(row["source"], row["hardware"], ranks, nbytes / MIB)
    return Published(line, row["source"], row["hardware"], cluster, kind, ranks, nbytes, seconds, fitted)


def _cluster(hardware: str, several_hosts: bool) -> Cluster | None:
    for words, of_several, name in _CLUSTERS:
        if of_several == several_hosts and all(word in hardware for word in words):
            return _loaded(name) if name else None
    return None


@lru_cache
def _loaded(name: str) -> Cluster:
    return load(name)


def _without_sums(cluster: Cluster) -> Cluster:
    return replace(cluster, levels=tuple(replace(level, in_switch=None) for level in cluster.levels))


def _is_fitted(source: str, hardware: str, ranks: int, mib: float) -> bool:
    return any(of in source and on in hardware and ranks in group and mib in sizes for of, on, group, sizes in _FITTED)


def main(path: Path) -> dict[str, Any]:
    """Print errors by source and size, and return them.

    Raises:
        RecipeError: the file cannot be read.
    """
    found, left_out = read(path)
    judged = [row for row in found if not row.fitted]
    groups: dict[tuple[str, ...], list[Published]] = defaultdict(list)
    for row in judged:
        groups[(row.cluster.name, short(row.source), row.hardware, row.kind, str(row.ranks))].append(row)
    console = table_console()
    console.print(
        f"{len(judged)} rows judged, {len(found) - len(judged)} fitted, {left_out.total()} left out: "
        + "; ".join(f"{count} {reason}" for reason, count in left_out.most_common()),
        highlight=False,
    )
    console.print(_table(groups))
    return {
        "groups": [_as_json(key, rows) for key, rows in groups.items()],
        "fitted_lines": [row.line for row in found if row.fitted],
        "left_out": dict(left_out),
    }


def mean_error(rows: Iterable[Published], low: float = 0.0, high: float = float("inf")) -> float | None:
    """Return the mean of the absolute errors of rows of some sizes; None where there are none."""
    errors = [abs(row.error) for row in rows if low <= row.nbytes < high]
    return statistics.fmean(errors) if errors else None


def short(source: str) -> str:
    """Return what to call a source: without the address and version that stand around its name."""
    return source.removeprefix("https://github.com/").partition("@")[0].partition(" slide")[0].partition(":")[0]


def _table(groups: Mapping[tuple[str, ...], list[Published]]) -> Table:
    table = Table(title="Mean error of expected times, in per cent", title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("cluster", "source", "hardware", "collective", "ranks", "rows", *_BANDS):
        table.add_column(head, justify="left" if head in ("cluster", "source", "hardware", "collective") else "right")
    for key, rows in groups.items():
        errors = [mean_error(rows, *band) for band in _BANDS.values()]
        table.add_row(*key, str(len(rows)), *("" if error is None else f"{error * 100:.1f}" for error in errors))
    return table


def _as_json(key: tuple[str, ...], rows: list[Published]) -> dict[str, Any]:
    cluster, source, hardware, kind, ranks = key
    errors = {name: mean_error(rows, *band) for name, band in _BANDS.items()}
    named = {"cluster": cluster, "source": source, "hardware": hardware, "collective": kind, "ranks": int(ranks)}
    return {**named, "rows": len(rows), "mean_error": errors, "worst": max((row.error for row in rows), key=abs)}
