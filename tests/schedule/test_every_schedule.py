"""What holds for every schedule, over ranks, micro-batches, chunks and batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedule import Edges, Kind, Op, communicate, evaluation, make, validate
from paceline.schedule.formulas import ideal_bubble, peak_activations, weight_versions
from paceline.schedule.places import consecutive, depths
from tests.schedule.cases import Case, cases, prove
from tests.schedule.walker import walk

EXACT = 1e-12


@given(cases())
def test_it_is_right_and_takes_what_theory_says(case: Case) -> None:
    schedule = case.schedule()
    account = prove(schedule)
    walk(schedule, Edges.chain(schedule.stages))
    shape = (case.kind, case.ranks, case.micro_batches)
    bubble = ideal_bubble(*shape, chunks=case.chunks, batches=case.batches)
    peaks = peak_activations(*shape, chunks=case.chunks, batches=case.batches)
    versions = weight_versions(*shape, batches=case.batches)
    assert account.bubble <= bubble + EXACT
    assert all(peak <= promised for peak, promised in zip(account.rank_peaks, peaks, strict=True))
    assert all(kept <= versions[stage % case.ranks] for stage, kept in enumerate(account.stage_versions))
    if case.kind is not Kind.INTERLEAVED or case.micro_batches % case.ranks == 0:
        assert account.bubble == pytest.approx(bubble, abs=EXACT)
        assert case.kind is Kind.ZB_V or account.rank_peaks == peaks


@given(cases())
def test_it_says_what_it_is(case: Case) -> None:
    schedule = case.schedule()
    several = case.batches > 1 or (case.kind is Kind.PIPEDREAM and case.micro_batches > 1)
    assert schedule.is_asynchronous == (case.kind.is_asynchronous and several)
    assert schedule.splits_backward == case.kind.splits_backward
    assert schedule.micro_batches == case.micro_batches * case.batches
    assert schedule.name == case.kind.value
    for rank in range(case.ranks):
        assert len(schedule.stages_of(rank)) == (2 if case.kind is Kind.ZB_V else case.chunks)


@given(cases().filter(lambda case: not case.kind.is_asynchronous))
def test_synchronous_ones_end_with_one_update_of_each_stage(case: Case) -> None:
    schedule = case.schedule()
    for rank, actions in enumerate(schedule.actions):
        stages = schedule.stages_of(rank)
        end = [(action.op, action.stage, action.version) for action in actions[-2 * len(stages) :]]
        assert end == [*((Op.REDUCE, stage, 0) for stage in stages), *((Op.UPDATE, stage, 1) for stage in stages)]
        assert all(action.version == 0 for action in actions if action.op.is_compute)


@settings(max_examples=50)
@given(st.integers(2, 6), st.integers(1, 14), st.integers(2, 4))
def test_interleaving_is_never_slower_than_1f1b(ranks: int, micro_batches: int, chunks: int) -> None:
    account = prove(Case(Kind.INTERLEAVED, ranks, micro_batches, chunks).schedule())
    assert account.bubble <= ideal_bubble(Kind.ONE_F_ONE_B, ranks, micro_batches) + EXACT


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 3), (3, 5), (4, 8), (6, 11), (8, 20)])
def test_no_rank_of_zb_v_waits_once_it_has_begun(ranks: int, micro_batches: int) -> None:
    account = prove(Case(Kind.ZB_V, ranks, micro_batches).schedule())
    assert account.stall == pytest.approx(0, abs=EXACT)
    assert account.rank_peaks == (2 * ranks,) * ranks or micro_batches < 2 * ranks


COUNTS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(COUNTS, st.integers(0, 9))
def test_replicas_take_micro_batches_in_turns(counts: list[int], more: int) -> None:
    replicas = consecutive(counts)
    schedule = make("1f1b", sum(counts), max(counts) + more, replicas=replicas)
    edges = Edges.chain(len(counts))
    complete = communicate(schedule, edges)
    account = validate(complete, edges)
    walk(complete, edges)
    assert all(peak <= depth for peak, depth in zip(account.stage_peaks, depths(replicas), strict=True))


@given(COUNTS, st.integers(1, 3))
def test_replicas_of_pipedream_update_together(counts: list[int], rounds: int) -> None:
    replicas = consecutive(counts)
    schedule = make("pipedream", sum(counts), 6 * rounds, replicas=replicas)
    edges = Edges.chain(len(counts))
    complete = communicate(schedule, edges)
    account = validate(complete, edges)
    walk(complete, edges)
    assert all(kept <= depth for kept, depth in zip(account.stage_versions, depths(replicas), strict=True))
    for stage, ranks in enumerate(replicas):
        for rank in ranks:
            updates = [a.version for a in complete.actions[rank] if a.op is Op.UPDATE and a.stage == stage]
            assert updates == list(range(1, 6 * rounds // len(ranks) + 1))


@given(cases())
def test_evaluation_goes_forward_only_wherever_stages_lie(case: Case) -> None:
    replicas = case.schedule().replicas
    schedule = evaluation(replicas, case.micro_batches)
    account = prove(schedule)
    assert not schedule.has_backward and {action.op for action in schedule.everything()} == {Op.FORWARD}
    if case.kind is not Kind.ZB_V and case.micro_batches % case.ranks == 0:
        stages_per_rank = len(replicas) // case.ranks
        assert account.makespan == case.micro_batches * stages_per_rank + case.ranks - 1
