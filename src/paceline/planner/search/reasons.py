"""Why a plan lost against the best one, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.planner import words
from paceline.planner.search.candidates.candidate import Candidate
from paceline.planner.search.certainty import certainty, is_clear
from paceline.simulator.workload import Recompute

KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "what the backward pass reads of the forward pass",
    "buffers": "gathered parameters and working space",
}
_LEAST = 0.2
"""Part of what is lost that a cause must have to be named."""
_TIMES = 1.5
"""From this ratio on it is told as one."""


def why_not(plan: Candidate, best: Candidate | None) -> str:
    """Return why a plan is not the best: what does not fit, or what its time goes to that the best one's does not."""
    if not plan.fits:
        kind, largest = max(plan.memory.items(), key=lambda item: item[1])
        held, over = words.size(plan.memory_bytes), words.size(plan.memory_bytes - plan.limit_bytes)
        return f"does not fit: {held} on a rank are {over} too many; {words.size(largest)} of them are {KINDS[kind]}"
    if best is None:
        return "fits, but takes axes that are not allowed"
    if plan is best:
        return ""
    if plan.step_s <= best.step_s:
        return f"not slower, but less sure: {_sure(plan)} against {_sure(best)}"
    close = "" if is_clear(certainty(best, plan)) else ", which is within the error"
    causes = _causes(plan, best)
    return f"{_slower(plan.step_s / best.step_s)}{close}{': ' if causes else ''}{causes}"


def _slower(factor: float) -> str:
    return f"{words.times(factor)} as long" if factor >= _TIMES else f"{factor - 1:.1%} slower"


def _sure(plan: Candidate) -> str:
    return f"+{plan.step_s_error / plan.step_s:.0%}"


def _causes(plan: Candidate, best: Candidate) -> str:
    """Return the one or two largest causes, `0.9 s more of communication along dp that nothing hides`."""
    lost = sorted(_lost(plan, best), reverse=True)
    named = [item for item in lost[:2] if item[0] > _LEAST * (plan.step_s - best.step_s)]
    return " and ".join(f"{words.time(seconds)} more {cause}" for seconds, cause in named)


def _lost(plan: Candidate, best: Candidate) -> Iterator[tuple[float, str]]:
    """Yield what a plan spends more seconds on than the best one does, and how many."""
    parts = [
        (plan.compute_s - best.compute_s, _computing(plan, best)),
        (plan.bubble_s - best.bubble_s, "of waiting in the pipeline (bubble)"),
        (plan.optimizer_s - best.optimizer_s, "of updates, whose state is split less"),
        (plan.constant_s - best.constant_s, "of constant cost"),
    ]
    for axis, seconds in plan.exposed_s.items():
        parts.append((seconds - best.exposed_s.get(axis, 0.0), f"of communication along {axis} that nothing hides"))
    return (part for part in parts if part[0] > 0)


def _computing(plan: Candidate, best: Candidate) -> str:
    """Return why a plan computes longer."""
    if plan.recompute.value > best.recompute.value:
        what = "attention" if plan.recompute is Recompute.SELECTIVE else "blocks"
        return f"of computing, {what} twice among it to fit into memory"
    if plan.number("tp") > best.number("tp"):
        return "of computing, in products that tp makes small"
    if plan.number("micro_batch") < best.number("micro_batch"):
        return "of computing, in products that small micro-batches make small"
    if plan.number("pp") > best.number("pp"):
        return "of computing, on the rank with the most layers"
    return "of computing"
