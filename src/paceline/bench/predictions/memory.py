"""Bytes of published runs, from the closed form of a rank's memory and what libraries allocate beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.bench.predictions.configurations import Configuration
from paceline.bench.predictions.readings import Quantity
from paceline.bench.predictions.samples import Sample
from paceline.cluster.cluster import Cluster
from paceline.simulator.closed_form.estimates import Footprint
from paceline.simulator.closed_form.footprint import footprint, footprints_of_ends
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Numbers, Recompute, Workload

_MIB = 2.0**20
# cuBLAS keeps a workspace for each handle and stream, of which a step has two; results that repeat ask for one of
# 32 MiB (CUBLAS_WORKSPACE_CONFIG=:4096:8), which is Hopper's default too. Transformer Engine has one more.
_WORKSPACE = 8.125 * _MIB
_LARGE_WORKSPACE = 32 * _MIB
_STREAMS = 2
_ENGINE = 4 * _MIB
_LARGE_ENGINE = 32 * _MIB


def bytes_of(samples: Sequence[Sample], workload: Workload, layouts: Layouts, cluster: Cluster) -> Numbers:
    """Return what samples of one quantity and one practice take, in bytes or as a share."""
    quantity, practice = samples[0].reading.quantity, samples[0].configuration.practice
    if practice.layers_alone:
        workload = replace(workload, blocks=tuple(block for block in workload.blocks if block.repeats))
    first, last = footprints_of_ends(workload, layouts)
    if quantity is Quantity.ACTIVATIONS:
        return first.activations
    if quantity is Quantity.ACTIVATION_SHARE:
        whole = replace(
            layouts,
            recompute=np.full_like(layouts.recompute, Recompute.NONE.value),
            regions=np.zeros_like(layouts.regions),
        )
        return np.asarray(first.activations / footprints_of_ends(workload, whole)[0].activations)
    held = last if practice.last_rank else footprint(workload, layouts)
    libraries = np.array([_libraries(sample.configuration, cluster) for sample in samples])
    if quantity is Quantity.PARAMETERS:
        return _state(held)
    return np.asarray((_state(held) if quantity is Quantity.STATE else held.total) + libraries)


def _state(held: Footprint) -> Numbers:
    return held.parameters + held.gradients + held.optimizer


def _libraries(configuration: Configuration, cluster: Cluster) -> float:
    """Return bytes of the workspaces of libraries, where a practice counts them."""
    if not configuration.practice.workspaces:
        return 0.0
    ampere = "a100" in cluster.slowest.device.name.lower()
    repeats = configuration.notes.deterministic
    each = _WORKSPACE if ampere and not repeats else _LARGE_WORKSPACE
    has_engine = configuration.notes.flags.get("transformer-impl", "transformer_engine") != "local"
    return _STREAMS * each + has_engine * (_ENGINE if ampere else _LARGE_ENGINE)
