"""Which described cluster a published run is predicted on: by the kind of device that it names, and by its source."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.bench.predictions.rows import Row, Unusable


@dataclass(frozen=True)
class Machine:
    """A kind of device as publications name it.

    Attributes:
        names: of which one occurs in the column `gpu_type`, in lower case.
        source: what occurs in the source, the system or the notes, in lower case; nothing where any will do.
        cluster: the shipped one that stands for it; nothing where none does.
    """

    names: tuple[str, ...]
    source: str
    cluster: str


# The first that fits is taken. A100s with 40 GB, and H100s with a lower power limit, have no cluster of their own:
# they are predicted on their kind's, and their residuals show it.
MACHINES = (
    Machine(("a100",), "vtrain", "vtrain-a100"),
    Machine(("a100",), "", "dgx-a100"),
    Machine(("gh200",), "", ""),
    Machine(("gb300", "b300"), "", ""),
    Machine(("gb200",), "", "gb200-nvl72"),
    Machine(("b200",), "", "b200"),
    Machine(("h200",), "", "h200"),
    Machine(("h100",), "ddc", "ddc-h100"),
    Machine(("h100",), "roce", "roce-h100"),
    Machine(("h100",), "", "dgx-h100"),
    Machine(("v100",), "", "v100-25gbe"),
    Machine(("tpu v4", "tpuv4", "tpu-v4"), "", "tpu-v4"),
    Machine(("tpu v5p", "tpuv5p", "tpu-v5p"), "", "tpu-v5p"),
)


def cluster_name(row: Row) -> str:
    """Return the name of the cluster on which a row is predicted.

    Raises:
        Unusable: the row names no device, or one that no cluster describes.
    """
    given = row.text("gpu_type")
    if not given:
        raise Unusable("no kind of GPU is named")
    kind = given.lower()
    about = f"{row.text('source')} {row.text('system')}".lower()
    for machine in MACHINES:
        if any(name in kind for name in machine.names) and machine.source in about:
            if not machine.cluster:
                break
            return machine.cluster
    raise Unusable(f"no cluster is described for '{given}'")
