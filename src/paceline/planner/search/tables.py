"""A ranking for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console

from paceline.planner import words
from paceline.planner.printing import print_table, say, section
from paceline.planner.search.candidates.candidate import Candidate, mesh_of
from paceline.planner.search.ranking import Ranking
from paceline.planner.search.reasons import KINDS, why_not
from paceline.planner.search.shortfall import Near, Shortfall
from paceline.planner.search.strategies import Strategy, strategies

_PLANS = ("plan", "step", "tokens/s", "MFU", "memory", "bubble", "exposed", "$/Mtoken")
_STRATEGIES = ("strategy", "splits", "parameters", "gradients", "optimizer", "kept", "on a rank", "sends")
_WIDE = 48
"""Cells of the picture of where time goes."""
Row = tuple[str, ...]


def print_ranking(found: Ranking, console: Console, *, top: int) -> None:
    """Print the best plans beside those that are always shown, why these lost, and what each strategy needs.

    Args:
        found: what to print.
        console: where.
        top: how many plans to list.
    """
    asked = found.asked
    say(
        console,
        f"{asked.workload.name}: {asked.batch} samples a step on {asked.devices} devices of {asked.cluster.name}, "
        f"{words.size(asked.memory_bytes)} each. {found.fitting:,} of {found.considered:,} layouts fit and are worth "
        f"a look: {words.time(found.estimating_s)}; the best were simulated: {words.time(found.simulating_s)}.",
    )
    shown = list(found.plans[:top])
    beside = [(one.name, one.plan) for one in found.baselines if one.plan is not None]
    if shown:
        section(console, "plans")
        rows = [_row(_name(plan), plan) for plan in shown]
        print_table(console, _PLANS, [*rows, *(_row(f"{name}: {_name(plan)}", plan) for name, plan in beside)])
        say(console, _sure(found))
        section(console, "where the time goes")
        for name, plan in [("best", shown[0]), *((name, plan) for name, plan in beside if plan.fits)]:
            say(console, f"{name:>8} {_bar(plan, max(shown[0].step_s, *(each.step_s for _, each in beside), 0.0))}")
        say(console, f"{'':>8} # computes, ~ waits for communication, . waits in the pipeline, + updates, and the rest")
        section(console, "what the best one sends")
        say(console, _links(shown[0]))
    if found.shortfall is not None:
        section(console, "nothing fits")
        for line in lacking(found.shortfall, asked.devices, asked.batch):
            say(console, line)
    section(console, "why not")
    for line in _losers(found, shown):
        say(console, line)
    alone = asked.alone
    section(console, f"each strategy by itself on {alone.devices} devices, for a batch of {alone.batch}")
    listed = strategies(asked.workload, alone.devices, alone.batch)
    print_table(console, _STRATEGIES, _strategies(one for one in listed if one.memory is not None))
    for one in listed:
        if one.memory is None:
            say(console, f"{one.name.value}: {one.why_not}.")
    say(console, "zero-1 and server cannot be executed yet; of server, the server sends that. See docs/planning.md.")


def lacking(lack: Shortfall, devices: int, batch: int) -> Iterator[str]:
    """Yield what is missing where nothing fits, and what would do."""
    if lack.layout is None:
        yield f"no mesh divides both {devices} devices and a batch of {batch} samples with these axes."
    else:
        each = ", ".join(f"{words.size(nbytes)} {KINDS[kind]}" for kind, nbytes in lack.memory.items() if nbytes)
        least, over = words.size(sum(lack.memory.values())), words.size(lack.missing_bytes)
        yield (
            f"the least that a rank can need is {least}, {over} too many, with {mesh_of(lack.layout)}, blocks computed "
            f"again, and micro-batches of {int(lack.layout.micro_batch[0])}."
        )
        yield f"of these: {each}."
    for near in lack.near:
        nbytes = words.size(sum(near.memory.values()))
        yield f"would fit: {_near(near, devices, batch)}, with {mesh_of(near.layout)}: {nbytes} on a rank."
    if not lack.near:
        yield "nothing near does: not a thousand times the devices, nor a thousand times the batch."


def _near(near: Near, devices: int, batch: int) -> str:
    if near.asked.devices != devices:
        return f"{near.asked.devices} devices"
    return f"a batch of {near.asked.batch} samples" if near.asked.batch != batch else "all axes"


def _name(plan: Candidate) -> str:
    """Return a plan in a few words: its mesh, schedule, micro-batches and what it computes again."""
    parts = [str(plan.mesh)]
    if plan.schedule is not None:
        chunks = plan.number("chunks")
        parts.append(f"{plan.schedule} x{chunks}" if plan.schedule == "interleaved" else plan.schedule)
    parts.append(f"{plan.number('micro_batches')} x {plan.number('micro_batch')}")
    if plan.number("zero"):
        parts.append(f"zero-{plan.number('zero')}")
    if plan.number("regions"):
        parts.append("regions")
    if plan.recompute.value:
        parts.append(f"recompute {plan.policy.value}")
    return " ".join(parts)


def _row(name: str, plan: Candidate) -> Row:
    cost = plan.dollars_per_million_tokens
    return (
        name,
        f"{words.time(plan.step_s)} +{plan.step_s_error / plan.step_s:.0%}",
        words.rate(plan.tokens, plan.step_s),
        f"{plan.mfu:.1%}",
        words.size(plan.memory_bytes) + ("" if plan.fits else " !"),
        f"{plan.bubble:.1%}",
        f"{plan.exposed / plan.step_s:.1%}",
        "-" if cost is None else f"{cost:.3g}",
    )


def _sure(found: Ranking) -> str:
    best = found.plans[0]
    error = f"A step may well take {best.step_s_error / best.step_s:.0%} longer."
    others = found.as_good - 1
    if others == 0:
        return f"{error} No other mesh comes so close that this error could decide."
    which = f"{others} other mesh{'es' * (others > 1)} of {len(found.plans) - 1} looked at"
    return f"{error} {which} come so close that this error may decide."


def _bar(plan: Candidate, longest: float) -> str:
    rest = plan.optimizer_s + plan.constant_s
    parts = (("#", plan.compute_s), ("~", plan.exposed), (".", plan.bubble_s), ("+", rest))
    bar = "".join(mark * round(_WIDE * seconds / longest) for mark, seconds in parts)
    return f"{bar} {words.time(plan.step_s)}"


def _links(plan: Candidate) -> str:
    sent = ", ".join(f"{words.size(nbytes)} over {level}" for level, nbytes in plan.link_bytes.items())
    exposed = ", ".join(f"{words.time(s)} along {axis}" for axis, s in plan.exposed_s.items() if s > 0)
    return f"each rank in a step: {sent or 'nothing'}; not hidden: {exposed or 'nothing'}"


def _losers(found: Ranking, shown: list[Candidate]) -> Iterator[str]:
    best = shown[0] if shown else None
    for one in found.baselines:
        if one.plan is None:
            yield f"{one.name} ({one.what}): {one.why_not}."
        elif one.plan.mesh == (best.mesh if best else None):
            yield f"{one.name} ({one.what}): its mesh is that of the best plan."
        else:
            yield f"{one.name} ({one.what}), {one.plan.mesh}: {why_not(one.plan, best)}."
    for plan in shown[1:]:
        yield f"{plan.mesh}: {why_not(plan, best)}."


def _strategies(listed: Iterable[Strategy]) -> Iterator[Row]:
    for one in listed:
        assert one.memory is not None
        cells = (words.size(one.memory[kind]) for kind in ("parameters", "gradients", "optimizer", "activations"))
        yield one.name.value, one.name.summary, *cells, words.size(one.memory_bytes), words.size(one.sent_bytes)
