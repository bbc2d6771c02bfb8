"""Ways of splitting one step, many at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Layouts:
    """Ways of splitting, as arrays of equal length.

    Ranks are numbered with `tp` fastest, then `hw`, `sp`, `fsdp`, `dp` and, slowest, `pp`.

    Attributes:
        dp: replicas of the parameters.
        fsdp: parts of the batch among which parameters, gradients or optimizer state are split too.
        tp, sp, hw: parts of features, of time, of height.
        pp: ranks of a pipeline.
        zero: what `fsdp` splits: 1 the optimizer's state, 2 gradients too, 3 parameters too. With `dp` alone, 0; where
            it is 1 and `fsdp` is 1, the optimizer's state is split over `dp` (a "distributed optimizer").
        micro_batch: samples of a micro-batch on one rank.
        micro_batches: of a step, on one rank.
        chunks: stages on each rank of a pipeline.
        schedule: index into `SCHEDULES`.
        recompute: value of a `workload.Recompute`.
        regions: norms and residuals between the layers that `tp` splits are split along the sequence.
        overlap: sums of gradients run beside the backward pass.
        server: sums of gradients go through a parameter server instead of an all-reduce.
    """

    dp: Integers
    fsdp: Integers
    tp: Integers
    sp: Integers
    hw: Integers
    pp: Integers
    zero: Integers
    micro_batch: Integers
    micro_batches: Integers
    chunks: Integers
    schedule: Integers
    recompute: Integers
    regions: Flags
    overlap: Flags
    server: Flags

    @classmethod
    def of(cls, **given: object) -> Self:
        """Make layouts from numbers or sequences; what is not given is 1, 0 or no."""
        defaults = {"zero": 0, "schedule": 0, "recompute": 0, "regions": False, "overlap": True, "server": False}
        unknown = set(given) - {field.name for field in fields(cls)}
        if unknown:
            raise TypeError(f"layouts have no {', '.join(sorted(unknown))}")
        values = {field.name: given.get(field.name, defaults.get(field.name, 1)) for field in fields(cls)}
        arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value)) for value in values.values()))
        kinds = {name: np.bool_ if name in ("regions", "overlap", "server") else np.int64 for name in values}
        return cls(**{name: array.astype(kinds[name]) for name, array in zip(values, arrays, strict=True)})

    def __len__(self) -> int:
        return len(self.dp)

    def __getitem__(self, which: Integers | Flags | slice) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    @property
    def devices(self) -> Integers:
        """How many ranks each layout needs."""
        return self.dp * self.fsdp * self.tp * self.sp * self.hw * self.pp

    @property
    def replicas(self) -> Integers:
        """Into how many parts the batch is split."""
        return self.dp * self.fsdp

    @property
    def batch(self) -> Integers:
        """Samples of a step, of all ranks."""
        return self.replicas * self.micro_batch * self.micro_batches


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
"""What `Layouts.schedule` counts: names of `schedule.kinds`."""
