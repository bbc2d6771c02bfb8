"""A ranking as one JSON object; its keys are documented in `docs/planning.md` and stay."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paceline.plan import Plan
from paceline.planner.search.candidates.candidate import Candidate, mesh_of
from paceline.planner.search.certainty import certainty
from paceline.planner.search.ranking import Ranking
from paceline.planner.search.reasons import why_not
from paceline.planner.search.shortfall import Shortfall
from paceline.planner.search.strategies import Strategy, strategies


def to_json(found: Ranking, *, top: int, base: Plan | None = None) -> dict[str, Any]:
    """Return the object.

    Args:
        found: it.
        top: how many plans to list.
        base: what plans take from elsewhere; see `Candidate.plan`.
    """
    asked = found.asked
    best = found.plans[0] if found.plans else None
    return {
        "plans": [plan_to_json(plan, best, base) for plan in found.plans[:top]],
        "baselines": [
            {
                "name": one.name,
                "what": one.what,
                "why_not": one.why_not,
                "plan": None if one.plan is None else plan_to_json(one.plan, best, base),
            }
            for one in found.baselines
        ],
        "nothing_fits": None if found.shortfall is None else _shortfall(found.shortfall),
        "strategies": [_strategy(one) for one in strategies(asked.workload, asked.alone.devices, asked.alone.batch)],
        "workload": asked.workload.name,
        "cluster": asked.cluster.name,
        "devices": asked.devices,
        "batch": asked.batch,
        "memory_limit_bytes": asked.memory_bytes,
        "layouts": {"considered": found.considered, "fitting": found.fitting},
        "as_good_as_the_best": found.as_good,
        "seconds": {"estimating": found.estimating_s, "simulating": found.simulating_s},
    }


def plan_to_json(plan: Candidate, best: Candidate | None, base: Plan | None = None) -> dict[str, Any]:
    """Return the object of one plan."""
    return {
        "mesh": str(plan.mesh),
        "schedule": plan.schedule,
        "micro_batches": plan.number("micro_batches"),
        "step_s": plan.step_s,
        "step_s_error": plan.step_s_error,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "memory_bytes": plan.memory_bytes,
        "dollars_per_million_tokens": plan.dollars_per_million_tokens,
        "ranks": plan.devices,
        "micro_batch": plan.number("micro_batch"),
        "chunks": plan.number("chunks"),
        "zero": plan.number("zero"),
        "recompute": plan.policy.value,
        "regions": bool(plan.number("regions")),
        "fits": plan.fits,
        "memory": dict(plan.memory),
        "bubble": plan.bubble,
        "seconds": {
            "compute": plan.compute_s,
            "bubble": plan.bubble_s,
            "optimizer": plan.optimizer_s,
            "constant": plan.constant_s,
            "exposed": dict(plan.exposed_s),
        },
        "link_bytes": dict(plan.link_bytes),
        "certainty": None if best is None or not plan.fits else certainty(best, plan),
        "why_not": why_not(plan, best),
        "plan": plan.plan(base).to_dict(),
    }


def _shortfall(lack: Shortfall) -> dict[str, Any]:
    return {
        "mesh": None if lack.layout is None else str(mesh_of(lack.layout)),
        "memory": dict(lack.memory),
        "missing_bytes": lack.missing_bytes if lack.layout is not None else None,
        "near": [
            {
                "devices": near.asked.devices,
                "batch": near.asked.batch,
                "mesh": str(mesh_of(near.layout)),
                "memory": dict(near.memory),
            }
            for near in lack.near
        ],
    }


def _strategy(one: Strategy) -> dict[str, Any]:
    return {**asdict(one), "name": one.name.value, "executable": one.name.is_executable}
