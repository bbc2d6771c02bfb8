"""The schedules there are, by name, and what each needs."""

from __future__ import annotations

import math
from enum import Enum

from paceline.errors import ScheduleError, nearest
from paceline.schedule.actions import Schedule
from paceline.schedule.gpipe import gpipe
from paceline.schedule.interleaved import interleaved
from paceline.schedule.naive import naive
from paceline.schedule.one_f_one_b import one_f_one_b
from paceline.schedule.pipedream import pipedream
from paceline.schedule.pipedream_2bw import pipedream_2bw
from paceline.schedule.places import Replicas, one_each
from paceline.schedule.updates import update_at_end
from paceline.schedule.zb_h1 import zb_h1
from paceline.schedule.zb_v import zb_v


class Kind(Enum):
    """A family of schedules."""

    NAIVE = "naive"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_V = "zb-v"
    PIPEDREAM = "pipedream"
    PIPEDREAM_2BW = "pipedream-2bw"

    @property
    def summary(self) -> str:
        """One line for `--help` and error messages."""
        return {
            Kind.NAIVE: "one micro-batch at a time through all stages; one rank computes, the others wait",
            Kind.GPIPE: "all forward passes, then all backward passes; holds every micro-batch",
            Kind.ONE_F_ONE_B: "forward and backward passes in turns; holds as many micro-batches as there are stages",
            Kind.INTERLEAVED: "1F1B with several stages per rank: a smaller bubble for more messages",
            Kind.ZB_H1: "1F1B whose weight gradients fill a part of the bubble: a third of it is left",
            Kind.ZB_V: "two stages per rank, in a V: no rank waits once it has begun, at 1F1B's memory",
            Kind.PIPEDREAM: "1F1B that never drains; updates after each micro-batch, with stashed weights",
            Kind.PIPEDREAM_2BW: "batches that follow each other without draining, with two versions of the weights",
        }[self]

    @property
    def is_asynchronous(self) -> bool:
        """Whether it updates weights while micro-batches are in flight."""
        return self in (Kind.PIPEDREAM, Kind.PIPEDREAM_2BW)

    @property
    def splits_backward(self) -> bool:
        """Whether it computes the gradients of inputs and of weights apart."""
        return self in (Kind.ZB_H1, Kind.ZB_V)

    @property
    def replicates(self) -> bool:
        """Whether a stage may have several ranks."""
        return self in (Kind.ONE_F_ONE_B, Kind.PIPEDREAM)

    @classmethod
    def of(cls, name: str) -> Kind:
        """Return the kind of this name.

        Raises:
            ScheduleError: there is none.
        """
        names = [kind.value for kind in cls]
        if name not in names:
            raise ScheduleError(f"there is no schedule '{name}'; there are {', '.join(names)}.{nearest(name, names)}")
        return cls(name)


def make(
    name: str,
    ranks: int,
    micro_batches: int,
    *,
    chunks: int = 1,
    batches: int = 1,
    replicas: Replicas | None = None,
    vertical_sync: bool = False,
) -> Schedule:
    """Return a schedule without messages, which `communicate` adds once the edges between stages are known.

    Args:
        name: of a `Kind`.
        ranks: how many pipeline ranks there are.
        micro_batches: of one batch.
        chunks: stages per rank, for `interleaved`; `zb-v` always has two.
        batches: how many batches an asynchronous schedule runs before it drains; it numbers all their micro-batches on.
        replicas: for each stage, the ranks that compute it in turns, for `1f1b` and `pipedream`.
        vertical_sync: all stages of `pipedream` read the version that stage 0 reads.

    Raises:
        ScheduleError: they do not fit together; the message says what would.
    """
    kind = Kind.of(name)
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks), ("batches", batches)):
        if number < 1:
            raise ScheduleError(f"{what} is {number}; it must be at least 1.")
    _check_options(kind, chunks, batches, replicas, vertical_sync)
    places = one_each(ranks) if replicas is None else replicas
    _check_replicas(kind, ranks, micro_batches * batches, places, vertical_sync)
    match kind:
        case Kind.NAIVE:
            return update_at_end(naive(ranks, micro_batches))
        case Kind.GPIPE:
            return update_at_end(gpipe(ranks, micro_batches))
        case Kind.ONE_F_ONE_B:
            return update_at_end(one_f_one_b(places, micro_batches))
        case Kind.INTERLEAVED:
            return update_at_end(interleaved(ranks, micro_batches, chunks))
        case Kind.ZB_H1:
            return update_at_end(zb_h1(ranks, micro_batches))
        case Kind.ZB_V:
            return update_at_end(zb_v(ranks, micro_batches))
        case Kind.PIPEDREAM:
            return pipedream(places, micro_batches * batches, vertical_sync)
        case Kind.PIPEDREAM_2BW:
            if micro_batches < ranks:
                raise ScheduleError(
                    f"pipedream-2bw needs as many micro-batches in a batch as there are stages, or more: at least "
                    f"{ranks}, not {micro_batches}. Take more micro-batches, fewer stages, or 1f1b."
                )
            return pipedream_2bw(ranks, micro_batches, batches)


def _check_options(kind: Kind, chunks: int, batches: int, replicas: Replicas | None, vertical_sync: bool) -> None:
    if kind is Kind.INTERLEAVED and chunks < 2:
        raise ScheduleError("interleaved needs at least 2 chunks per rank; give chunks=2 or more, or take 1f1b.")
    if kind is Kind.ZB_V and chunks > 2:
        raise ScheduleError(f"zb-v has 2 chunks per rank, not {chunks}; leave chunks out, or take interleaved.")
    if kind not in (Kind.INTERLEAVED, Kind.ZB_V) and chunks > 1:
        raise ScheduleError(f"{kind.value} has one stage per rank; {chunks} chunks are for interleaved.")
    if batches > 1 and not kind.is_asynchronous:
        raise ScheduleError(
            f"{kind.value} drains after each batch; several batches in one schedule are for "
            "pipedream and pipedream-2bw."
        )
    if replicas is not None and not kind.replicates:
        raise ScheduleError(f"{kind.value} has one rank per stage; replicas are for 1f1b and pipedream.")
    if vertical_sync and kind is not Kind.PIPEDREAM:
        raise ScheduleError(f"vertical_sync is for pipedream: the stages of {kind.value} read one version anyway.")


def _check_replicas(kind: Kind, ranks: int, micro_batches: int, replicas: Replicas, vertical_sync: bool) -> None:
    named = sorted(rank for of_stage in replicas for rank in of_stage)
    if named != list(range(ranks)) or not all(replicas):
        raise ScheduleError(
            f"the replicas {list(map(list, replicas))} must name each of the {ranks} ranks once, from 0 to "
            f"{ranks - 1}, and at least one for every stage."
        )
    counts = sorted({len(of_stage) for of_stage in replicas})
    if micro_batches < counts[-1]:
        raise ScheduleError(
            f"a stage of {counts[-1]} ranks needs a micro-batch for each; give at least {counts[-1]}, "
            f"not {micro_batches}."
        )
    together = math.lcm(*counts)
    if kind is Kind.PIPEDREAM and micro_batches % together:
        below, above = micro_batches // together * together, -(-micro_batches // together) * together
        fitting = f"{below} or {above}" if below else f"{above}"
        raise ScheduleError(
            f"the ranks of a stage update after one micro-batch each, so pipedream needs a multiple of {together} "
            f"micro-batches here: {fitting}, not {micro_batches}."
        )
    if vertical_sync and len(counts) > 1:
        raise ScheduleError(
            f"vertical_sync needs stages that update equally often, so with as many ranks each, not {counts}."
        )
