"""The layout of a row: how its step is split among ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.bench.predictions.notes import Notes
from paceline.bench.predictions.practices import Practice
from paceline.bench.predictions.rows import Row, Unusable

_SCHEDULES = {
    "1f1b": "1f1b",
    "1f1b-i": "interleaved",
    "interleaved": "interleaved",
    "interleaved 1f1b": "interleaved",
    "gpipe": "gpipe",
    "zb-1p": "zb-h1",
    "zb-h1": "zb-h1",
    "zb-v": "zb-v",
}


@dataclass(frozen=True)
class Split:
    """How a step is split.

    Attributes:
        gpus: all of them.
        tp, pp, dp, cp: parts of features, stages, replicas and parts of the sequence.
        chunks: stages of each rank of a pipeline.
        micro_batch: samples.
        micro_batches: of a step on one rank.
        schedule: of the pipeline, by its name.
        assumed: columns that nothing in the row fixes.
    """

    gpus: int
    tp: int
    pp: int
    dp: int
    cp: int
    chunks: int
    micro_batch: int
    micro_batches: int
    schedule: str
    assumed: tuple[str, ...]

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.dp * self.micro_batch * self.micro_batches


def split_of(row: Row, practice: Practice, notes: Notes, layers: int) -> Split:
    """Return how a row's step is split.

    Raises:
        Unusable: too little is told, or what is told contradicts itself.
    """
    tp, pp, dp, cp, gpus = _ranks(row)
    micro_batch, batch = row.whole("micro_batch"), row.whole("global_batch")
    samples = micro_batch or 1
    if batch is None and micro_batch and practice.local_batch and pp == 1:
        batch = samples * dp
    if batch is None:
        raise Unusable("no global_batch")
    if batch % (samples * dp):
        raise Unusable("micro_batch and dp do not divide global_batch")
    chunks = row.whole("vpp") if pp > 1 else 1
    assumed = [] if micro_batch else ["micro_batch"]
    if chunks is None:
        chunks = max(layers // pp, 1) if practice.interleaves and not notes.schedule else 1
        assumed.append("vpp")
    schedule = _schedule(notes, chunks)
    if schedule == "zb-v":
        chunks = 2
    elif schedule == "interleaved" and chunks == 1:  # an interleaved schedule that does not say: a layer a stage
        chunks = max(2, round(layers / pp))
    return Split(
        gpus=gpus,
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        chunks=chunks,
        micro_batch=samples,
        micro_batches=batch // (samples * dp),
        schedule=schedule,
        assumed=tuple(assumed),
    )


def _ranks(row: Row) -> tuple[int, int, int, int, int]:
    """Return tp, pp, dp, cp and their product."""
    tp, pp, cp = row.whole("tp"), row.whole("pp"), row.whole("cp") or 1
    if tp is None or pp is None:
        raise Unusable("no tp" if tp is None else "no pp")
    gpus, dp = row.whole("gpus"), row.whole("dp")
    if dp is None:
        if gpus is None:
            raise Unusable("neither gpus nor dp")
        if gpus % (tp * pp * cp):
            raise Unusable("tp, pp and cp do not divide gpus")
        dp = gpus // (tp * pp * cp)
    product = tp * pp * cp * dp
    if gpus not in (None, product):
        raise Unusable("tp, pp, cp and dp do not multiply to gpus")
    return tp, pp, dp, cp, product


def _schedule(notes: Notes, chunks: int) -> str:
    if not notes.schedule:
        return "interleaved" if chunks > 1 else "1f1b"
    if notes.schedule not in _SCHEDULES:
        raise Unusable(f"no closed form for the schedule {notes.schedule}")
    named = _SCHEDULES[notes.schedule]
    return "interleaved" if named == "1f1b" and chunks > 1 else named
