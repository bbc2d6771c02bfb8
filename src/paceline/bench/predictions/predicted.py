"""Predictions for many published runs at once: those that share a cluster and the kind of their model in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.bench.predictions.configurations import Configuration
from paceline.bench.predictions.memory import bytes_of
from paceline.bench.predictions.samples import Sample
from paceline.cluster.cluster import Cluster
from paceline.simulator.closed_form.estimate import estimate
from paceline.simulator.closed_form.transformer import transformer
from paceline.simulator.layouts import SCHEDULES, Layouts
from paceline.simulator.workload import Numbers, Precision, Workload


@dataclass(frozen=True)
class Prediction:
    """A prediction.

    Attributes:
        value: seconds, bytes or a share, as the sample's quantity has it.
        spread: standard deviation of its logarithm, as far as the profile tells.
    """

    value: float
    spread: float


def predictions(samples: Sequence[Sample], clusters: Mapping[str, Cluster]) -> list[Prediction]:
    """Return a prediction for each sample."""
    found: list[Prediction | None] = [None] * len(samples)
    for chosen in grouped(samples):
        configurations = [samples[index].configuration for index in chosen]
        workload, layouts = described(configurations)
        cluster = clusters[configurations[0].cluster]
        picked = [samples[index] for index in chosen]
        if picked[0].is_memory:
            values = bytes_of(picked, workload, layouts, cluster)
            spread = np.zeros(len(picked))
        else:
            estimates = estimate(workload, layouts, cluster)
            values, spread = estimates.step_s, estimates.spread
        for index, value, each in zip(chosen, values, spread, strict=True):
            found[index] = Prediction(float(value), float(each))
    return [prediction for prediction in found if prediction is not None]


def described(configurations: Sequence[Configuration]) -> tuple[Workload, Layouts]:
    """Return configurations of one kind as one workload and as layouts."""
    first = configurations[0]

    def numbers(of: Callable[[Configuration], float]) -> Numbers:
        return np.array([of(each) for each in configurations], dtype=np.float64)

    workload = transformer(
        layers=numbers(lambda each: each.model.layers),
        hidden=numbers(lambda each: each.model.hidden),
        heads=numbers(lambda each: each.model.heads),
        sequence=numbers(lambda each: each.model.sequence),
        vocabulary=numbers(lambda each: each.model.vocabulary),
        kv_heads=numbers(lambda each: each.model.kv_heads),
        ffn=numbers(lambda each: each.model.ffn),
        positions=numbers(lambda each: each.model.positions),
        gated=first.model.gated,
        biases=first.model.biases,
        causal=first.model.causal,
        tied=first.model.tied,
        fused=first.fused,
        dropout=first.dropout,
        scattered=first.practice.scattered,
        precision=Precision(dtype=first.precision, gradient=first.practice.gradient),
        name=first.practice.name,
    )
    whole = [each.zero >= 2 for each in configurations]
    layouts = Layouts.of(
        dp=[1 if split else each.split.dp for each, split in zip(configurations, whole, strict=True)],
        fsdp=[each.split.dp if split else 1 for each, split in zip(configurations, whole, strict=True)],
        zero=[each.zero for each in configurations],
        tp=[each.split.tp for each in configurations],
        sp=[each.split.cp for each in configurations],
        pp=[each.split.pp for each in configurations],
        micro_batch=[each.split.micro_batch for each in configurations],
        micro_batches=[each.split.micro_batches for each in configurations],
        chunks=[each.split.chunks for each in configurations],
        schedule=[SCHEDULES.index(each.split.schedule) for each in configurations],
        recompute=[each.recompute.value for each in configurations],
        regions=[each.regions for each in configurations],
        overlap=[each.overlap for each in configurations],
    )
    return workload, layouts


def grouped(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the places of samples that can be predicted together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    kind: tuple[object, ...]
    for index, sample in enumerate(samples):
        one = sample.configuration
        model = one.model
        quantity = sample.reading.quantity if sample.is_memory else None
        kind = (one.practice, one.cluster, one.precision, one.fused, one.dropout, quantity)
        kind += (model.gated, model.biases, model.causal, model.tied)
        groups.setdefault(kind, []).append(index)
    return list(groups.values())
