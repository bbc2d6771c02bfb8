"""Rows as configurations: everything that a prediction needs, and what is missing where one cannot be made.

A column that is empty is filled by arithmetic where others fix it, by the model's published dimensions, or by the
practice of the row's source; what was assumed beyond that is named.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.bench.predictions.machines import cluster_name
from paceline.bench.predictions.models import Model, model_of
from paceline.bench.predictions.notes import Notes, notes_of
from paceline.bench.predictions.practices import Practice, practice_of
from paceline.bench.predictions.rows import Row, Unusable
from paceline.bench.predictions.splits import Split, split_of
from paceline.simulator.workload import Recompute

_RECOMPUTED = {
    "": Recompute.NONE,
    "none": Recompute.NONE,
    "no": Recompute.NONE,
    "full": Recompute.FULL,
    "checkpoint": Recompute.FULL,
    "layer": Recompute.FULL,
    "uniform": Recompute.FULL,
    "selective": Recompute.SELECTIVE,
    "selective op": Recompute.SELECTIVE,
    "selective per op": Recompute.SELECTIVE,
    "selective layer": Recompute.SELECTIVE,
}
_FORMATS = {
    "fp16": "float16",
    "fp16 mixed": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "amp_bf16": "bfloat16",
    "bf16-true": "bfloat16",
    "fp8": "float8",
    "amp_fp8": "float8",
    "float8": "float8",
    "float8 tensorwise": "float8",
    "float8 rowwise": "float8",
    "fp8-cs": "float8",
    "fp8-mx": "float8",
    "mxfp8": "float8",
    "nvfp4": "float4",
    "fp32": "float32",
    "float32": "float32",
}


@dataclass(frozen=True)
class Configuration:
    """A run, as far as a prediction needs it.

    Attributes:
        practice: of its source.
        cluster: the name of what it ran on.
        model: what was trained.
        split: how.
        precision: of products, by name.
        fused, dropout: as in `simulator.closed_form.transformer`.
        recompute, regions, zero, overlap: as in `simulator.layouts`.
        notes: what the row's notes say.
        assumed: columns that nothing in the row fixes, so that the practice of its source stands for them.
    """

    practice: Practice
    cluster: str
    model: Model
    split: Split
    precision: str
    fused: bool
    dropout: bool
    recompute: Recompute
    regions: bool
    zero: int
    overlap: bool
    notes: Notes
    assumed: tuple[str, ...]


def configuration_of(row: Row) -> Configuration:
    """Return the configuration of a row.

    Raises:
        Unusable: something is missing or contradicts itself, or the model is no dense Transformer.
    """
    if row.extra:
        raise Unusable("more cells than columns")
    practice, notes = practice_of(row), notes_of(row)
    model = model_of(row, practice, notes)
    cluster = cluster_name(row)
    split = split_of(row, practice, notes, model.layers)
    recompute = row.text("recompute").lower()
    policy, precision = recompute.replace("+sp", "").strip(), row.text("precision").lower() or practice.precision
    if policy not in _RECOMPUTED:
        raise Unusable(f"the recomputation '{recompute}' is not known")
    if precision not in _FORMATS:
        raise Unusable(f"the precision '{precision}' is not known")
    return Configuration(
        practice=practice,
        cluster=cluster,
        model=model,
        split=split,
        precision=_FORMATS[precision],
        fused=notes.fused(practice.fused),
        dropout=not model.gated if practice.dropout is None else practice.dropout,
        recompute=_RECOMPUTED[policy],
        regions="+sp" in recompute or notes.regions(practice.regions and split.tp > 1),
        zero=notes.zero(practice.zero),
        overlap=notes.overlap(practice.overlap),
        notes=notes,
        assumed=(*model.assumed, *split.assumed, *(() if row.text("precision") else ("precision",))),
    )
