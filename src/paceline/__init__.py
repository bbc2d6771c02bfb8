"""Paceline plans, proves and runs the distributed training of any PyTorch model.

The public names, and nothing else. They are imported when first used, so that `import paceline` costs no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.plan import Mesh, Pin, PipelinePlan, Plan
    from paceline.planner.explain import explain
    from paceline.planner.search.ranking import search
    from paceline.planner.simulated import simulate
    from paceline.planner.workload import workload_of
    from paceline.program.capture import capture
    from paceline.program.constraint import constrain
    from paceline.runtime.module import ParallelModule, parallelize
    from paceline.verify.run import verify

__version__ = "0.1.0"
__all__ = [
    "Mesh",
    "ParallelModule",
    "Pin",
    "PipelinePlan",
    "Plan",
    "__version__",
    "capture",
    "constrain",
    "explain",
    "parallelize",
    "search",
    "simulate",
    "verify",
    "workload_of",
]

_HOMES = {
    "Mesh": "paceline.plan",
    "Pin": "paceline.plan",
    "PipelinePlan": "paceline.plan",
    "Plan": "paceline.plan",
    "capture": "paceline.program.capture",
    "explain": "paceline.planner.explain",
    "search": "paceline.planner.search.ranking",
    "simulate": "paceline.planner.simulated",
    "workload_of": "paceline.planner.workload",
    "constrain": "paceline.program.constraint",
    "ParallelModule": "paceline.runtime.module",
    "parallelize": "paceline.runtime.module",
}


def __getattr__(name: str) -> Any:
    if name == "verify":  # a room and a verb at once: the package itself is callable
        return importlib.import_module("paceline.verify")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
