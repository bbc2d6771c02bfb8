"""Small questions for tests of the search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.files import load
from paceline.planner.search.question import Question, question
from paceline.simulator.closed_form.transformer import transformer
from paceline.simulator.workload import Workload


def cluster(devices: int = 64, name: str = "dgx-a100") -> Cluster:
    found = load(name)
    return replace(found, groups=(replace(found.groups[0], devices=devices),))


def workload(**changes: Any) -> Workload:
    """A GPT of 1.3 billion parameters."""
    shape = {"layers": 24, "hidden": 2048, "heads": 16, "sequence": 2048, "vocabulary": 50304}
    return transformer(**{**shape, **changes})


def asked(devices: int = 64, batch: int = 64, **options: Any) -> Question:
    return question(workload(), cluster(devices), batch=batch, **options)
