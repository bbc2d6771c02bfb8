"""Micro-batches that rows do not tell: publications show their fastest, so the fastest that fits is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.bench.predictions.configurations import Configuration
from paceline.bench.predictions.predicted import described, predictions
from paceline.bench.predictions.samples import Sample
from paceline.cluster.cluster import Cluster
from paceline.simulator.closed_form.footprint import footprint

_COLUMN = "micro_batch"
_MOST = 16
"""Samples of the largest micro-batch that is tried."""


def with_likely_micro_batches(samples: Sequence[Sample], clusters: Mapping[str, Cluster]) -> list[Sample]:
    """Return samples in which micro-batches that rows do not tell are those predicted to be fastest."""
    chosen = list(samples)
    tried: list[Sample] = []
    places: list[int] = []
    for place, sample in enumerate(samples):
        if _COLUMN in sample.configuration.assumed and not sample.is_memory:
            for one in _candidates(sample.configuration, clusters[sample.configuration.cluster]):
                tried.append(replace(sample, configuration=one))
                places.append(place)
    fastest: dict[int, float] = {}
    for place, sample, found in zip(places, tried, predictions(tried, clusters), strict=True):
        if found.value < fastest.get(place, float("inf")):
            fastest[place], chosen[place] = found.value, sample
    return chosen


def _candidates(configuration: Configuration, cluster: Cluster) -> Iterator[Configuration]:
    """Yield the configuration with micro-batches of 1, 2, 4 and so on that divide its batch and fit the device."""
    split = configuration.split
    per_replica = split.batch // split.dp
    size = 1
    while size <= _MOST and per_replica % size == 0:
        one = replace(split, micro_batch=size, micro_batches=per_replica // size)
        found = replace(configuration, split=one)
        held = footprint(*described([found])).total[0]
        if size == 1 or held <= cluster.slowest.device.memory_bytes:
            yield found
        size *= 2
