"""How a job is, in words and figures, for people."""

from __future__ import annotations

from typing import Any

from paceline.exchange.membership.seats import Role
from paceline.exchange.membership.state import State
from paceline.exchange.terms import Terms


def described(state: State, terms: Terms, *, deals: bool, saved: bool) -> dict[str, Any]:
    """Return how a job is; see `Observer.status`.

    Args:
        state: of the job.
        terms: of the job.
        deals: whether tasks are dealt now.
        saved: whether there is a snapshot of the end.
    """
    phase = "running" if deals else "waiting"
    if state.failed:
        phase = "failed"
    elif state.tasks.finished:
        phase = "finished" if saved else "saving"
    return {
        "state": phase,
        "why": state.failed or (wants(state, terms) if phase == "waiting" else ""),
        "epoch": state.view.epoch,
        "view": state.view.to_dict(),
        "tasks": state.tasks.counts(),
        "clock": state.tasks.clock,
        "snapshot": state.snapshots[-1].number if state.snapshots else terms.restored,
        "snapshots": [{"number": one.number, "clock": one.clock} for one in state.snapshots],
        "saving": state.snapshot and {"number": state.snapshot.number, "clock": state.snapshot.clock},
    }


def headcount(state: State, terms: Terms) -> dict[str, dict[str, int]]:
    """Return how many members there are, and with how many the job goes on."""
    workers = len(state.members(Role.WORKER, leaving=False))
    return {
        "have": {"workers": workers, "servers": len(state.members(Role.SERVER))},
        "need": {"workers": terms.workers, "servers": 1 if state.view.chains else terms.servers},
    }


def wants(state: State, terms: Terms) -> str:
    """Return for whom a job waits."""
    numbers = headcount(state, terms)
    have, need = numbers["have"], numbers["need"]
    if state.view.chains:
        return f"{have['workers']} workers are there; it goes on with {need['workers']}"
    servers = f"{have['servers']} of {need['servers']} servers"
    return f"{servers} and {have['workers']} of {need['workers']} workers are there"
