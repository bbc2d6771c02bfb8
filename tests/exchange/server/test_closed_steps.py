"""Steps on servers that come and go: equal to serial ones, clipped or not, and closed whoever dies in their midst."""

from __future__ import annotations

import faulthandler
import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import NonFiniteError
from paceline.exchange.client.client import ServerExchange
from paceline.exchange.client.closing import Norms
from paceline.exchange.client.pushes import Push
from paceline.exchange.interface import Interrupted, Rows
from paceline.exchange.job import Consistency, DenseTable, Initializer, Job, Rule, SparseTable
from paceline.exchange.shard.log import read_updates
from paceline.exchange.shard.norms import Stage, closing, norm_of
from tests.exchange.server.town import SECRET, WORKERS, Citizen, Town, town

RULE = Rule("momentum", {"lr": 0.05, "momentum": 0.9})
WEIGHT, BIAS, ROWS = 0, 1, 2
KEYS = torch.arange(12)
CLIP = 2.0
UNCLIPPED = math.inf


@pytest.fixture(autouse=True)
def _stacks() -> Iterator[None]:
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def job(pieces: int, *, clip: float | None = CLIP, replication: int = 2) -> Job:
    return Job(
        (
            DenseTable("weight", (9, 700), "float64", RULE),
            DenseTable("bias", (5,), "float64", RULE),
            SparseTable("rows", 3, "float64", Rule("sgd", {"lr": 0.05}), initializer=Initializer("zeros")),
        ),
        shards=6,
        pieces=pieces,
        replication=replication,
        clip=clip,
    )


def gradient(task: int, values: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Tensor, Tensor]:
    """Of dense tables, and of some rows: keys and values. Depends on all that was read."""
    draw = torch.Generator().manual_seed(task)
    noise = torch.randn(9, 700, generator=draw, dtype=torch.float64)
    keys = KEYS[torch.randperm(len(KEYS), generator=draw)[:5]]
    size = (0.05, 1.0)[task // 4 % 2]  # some steps are clipped, others not
    dense = {
        WEIGHT: size * (0.1 * values[WEIGHT] + 0.02 * noise + values[ROWS].mean()),
        BIAS: size * (values[BIAS] + noise[0, :5]),
    }
    return dense, keys, size * (values[ROWS][keys] + noise.view(-1)[:15].view(5, 3) + values[BIAS].sum())


def weight_of(task: int) -> float:
    return 1.0 + task % 3


def read(exchange: ServerExchange, clock: int) -> dict[int, Tensor]:
    values = {
        WEIGHT: torch.empty(9, 700, dtype=torch.float64),
        BIAS: torch.empty(5, dtype=torch.float64),
        ROWS: torch.empty(len(KEYS), 3, dtype=torch.float64),
    }
    dense = [WEIGHT, BIAS]
    exchange.pull_together(dense, [values[table] for table in dense], clock, {ROWS: (KEYS, values[ROWS])})
    return values


def do(exchange: ServerExchange, task: int) -> float | None:
    dense, keys, rows = gradient(task, read(exchange, exchange.job.clock(task)))
    norm = exchange.push([task], dense, {ROWS: Rows(keys, rows)}, weight_of(task))
    exchange.flush()
    return norm


def serial(
    begun: Mapping[int, Tensor], pieces: int, steps: int, clip: float = CLIP
) -> tuple[dict[int, Tensor], list[float]]:
    values = {table: nn.Parameter(tensor.clone()) for table, tensor in begun.items()}
    momentum = {table: torch.zeros_like(tensor) for table, tensor in begun.items()}
    norms = []
    for step in range(steps):
        tasks = range(step * pieces, (step + 1) * pieces)
        total = sum(map(weight_of, tasks))
        now = {table: value.detach() for table, value in values.items()}
        for value in values.values():
            value.grad = torch.zeros_like(value)
        for task in tasks:
            dense, keys, rows = gradient(task, now)
            for table, one in dense.items():
                values[table].grad += one * weight_of(task) / total  # type: ignore[operator]
            values[ROWS].grad[keys] += rows * weight_of(task) / total  # type: ignore[index]
        norms.append(float(nn.utils.clip_grad_norm_(list(values.values()), clip)))
        for table, value in values.items():
            assert value.grad is not None
            momentum[table] = (0.0 if table == ROWS else 0.9) * momentum[table] + value.grad
            value.data -= 0.05 * momentum[table]
    return {table: value.detach() for table, value in values.items()}, norms


def check_replicas(place: Town, tasks: int, pieces: int) -> None:
    """All replicas agree, each task counts once, and each step was closed once, with one norm."""
    copies = [
        replica.shard
        for server in place.servers.values()
        for replica in server.keeper.replicas.values()
        if replica.place.incoming is None
    ]
    final = {copy.number: copy.position for copy in copies}
    for records in read_updates(place.logs, final=final).values():
        assert sorted(task for record in records for task in record.tasks) == list(range(tasks))
        closed = [record.sequence - 1 for record in records if record.worker == 0]
        assert closed == list(range(tasks // pieces))
    assert len({copy.share(tasks // pieces - 1) for copy in copies}) == 1
    for copy in copies:
        other = next(one for one in copies if one.number == copy.number)
        for table in copy.tables:
            for name, tensor in copy.table(table).state().items():
                assert torch.equal(tensor, other.table(table).state()[name]), (copy.number, table, name)


@pytest.mark.parametrize("workers", [2, 4])
def test_it_equals_serial_clipping_though_servers_die(workers: int, tmp_path: Path) -> None:
    steps = 12
    with town(job(workers), tmp_path, 3) as place:
        reader = place.worker(99)
        begun = read(reader, 0)
        expected, norms = serial(begun, workers, steps)
        assert min(norms) < CLIP < max(norms)
        tasks, told, lock = itertools.count(), {}, threading.Lock()
        reached = [threading.Event() for _ in range(steps)]

        def work(number: int) -> None:
            exchange = place.worker(number)
            while (task := next(tasks)) < steps * workers:
                norm = do(exchange, task)
                if norm is not None:
                    with lock:
                        assert told.setdefault(task // workers, norm) == norm
                    reached[task // workers].set()
            exchange.close()

        with ThreadPoolExecutor(workers) as pool:
            running = [pool.submit(work, number) for number in range(workers)]
            for step in (2, 5, 8):
                assert reached[step].wait(240), place.view
                place.kill(max(place.servers))
                place.add()
            for one in running:
                one.result(240)
        place.settle()
        found = read(reader, steps)
        for table, values in expected.items():
            torch.testing.assert_close(found[table], values, rtol=1e-9, atol=1e-9)
        assert [told[step] for step in range(steps)] == pytest.approx(norms, rel=1e-9)
        check_replicas(place, steps * workers, workers)
        reader.close()


def dying(place: Town, number: int) -> ServerExchange:
    """A worker that closes nothing: it dies before."""
    tables = tuple(replace(table, consistency=Consistency.parse("asp")) for table in place.charter.job.tables)
    charter = replace(place.charter, job=replace(place.charter.job, tables=tables, clip=None))
    assert not charter.job.closes_steps
    return ServerExchange(charter, Citizen(place, WORKERS + number), SECRET)


@pytest.mark.parametrize("closed", [(), (0,), (1, 4), tuple(range(6))])
def test_the_task_of_a_worker_that_died_before_it_closed_a_step_is_done_again_and_closes_it(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    with town(job(2), tmp_path, 2) as place:
        one, dead = place.worker(1), dying(place, 2)
        begun = read(one, 0)
        assert do(one, 0) is None
        do(dead, 1)
        if closed:
            norms = Norms(0, 6)
            dead._errands.begin(norms)
            dead._errands.finish(norms)
            update = closing(0, norm_of(norms.shares.values()) or 0.0)
            push = Push(update.worker, update.sequence, (), update.weight, [-1] * 6, dead._cutter.cut({}, {}, False))
            push.pending = set(closed)
            dead._errands.begin(push)
            dead._errands.finish(push)
        dead.close()
        other = place.worker(3)
        if len(closed) < 6:
            for member in (one, other):  # the coordinator says that a task waits for somebody
                member._member.orphans = True  # type: ignore[misc]
            with pytest.raises(Interrupted):
                read(other, 1)
        expected, norms_of_steps = serial(begun, 2, 1)
        dense, keys, rows = gradient(1, begun)
        norm = other.push([1], dense, {ROWS: Rows(keys, 3 * rows)}, weight_of(1))  # servers have it: it changes nothing
        assert norm == pytest.approx(norms_of_steps[0], rel=1e-9)
        found = read(other, 1)
        for table, values in expected.items():
            torch.testing.assert_close(found[table], values, rtol=1e-9, atol=1e-9)
        check_replicas(place, 2, 2)
        one.close()
        other.close()


@pytest.mark.parametrize("clip", [CLIP, None])
def test_a_task_that_only_some_shards_got_is_done_again_from_what_all_of_them_had(
    clip: float | None, tmp_path: Path
) -> None:
    """No shard has applied the step for which others lack a piece."""
    with town(job(2, clip=clip), tmp_path, 2) as place:
        one, dead, other = place.worker(1), dying(place, 2), place.worker(3)
        begun = read(one, 0)
        do(one, 0)
        dense, keys, rows = gradient(1, read(dead, 0))
        outgoing = dead._cutter.cut(dense, {ROWS: Rows(keys, rows)}, True)
        push = Push(WORKERS + 2, 1, [1], weight_of(1), [1] * 6, outgoing)
        push.pending = {0, 2, 4}
        dead._errands.begin(push)
        dead._errands.finish(push)
        dead.close()
        norm = do(other, 1)
        expected, norms = serial(begun, 2, 1, clip or UNCLIPPED)
        assert norm == (None if clip is None else pytest.approx(norms[0], rel=1e-12))
        found = read(other, 1)
        for table, values in expected.items():
            torch.testing.assert_close(found[table], values, rtol=1e-12, atol=1e-12)
        check_replicas(place, 2, 2)
        one.close()
        other.close()


def test_two_who_close_the_same_step_agree(tmp_path: Path) -> None:
    with town(job(1), tmp_path, 2) as place:
        workers = [place.worker(number) for number in range(2)]
        begun = read(workers[0], 0)
        dense, keys, rows = gradient(0, begun)
        barrier = threading.Barrier(2)

        def work(exchange: ServerExchange) -> float | None:
            barrier.wait(240)
            return exchange.push([0], dense, {ROWS: Rows(keys, rows)}, weight_of(0))

        with ThreadPoolExecutor(2) as pool:
            norms = list(pool.map(work, workers))
        expected, (norm,) = serial(begun, 1, 1)
        assert set(norms) - {None} == {norms[0] or norms[1]}
        assert (norms[0] or norms[1]) == pytest.approx(norm, rel=1e-12)
        found = read(workers[1], 1)
        torch.testing.assert_close(found[WEIGHT], expected[WEIGHT], rtol=1e-9, atol=1e-9)
        check_replicas(place, 1, 1)
        for exchange in workers:
            exchange.close()


def test_a_norm_that_is_not_finite_is_not_applied(tmp_path: Path) -> None:
    with town(job(1, replication=1), tmp_path, 1) as place:
        exchange = place.worker(1)
        begun = read(exchange, 0)
        huge = {WEIGHT: torch.full((9, 700), 1e200, dtype=torch.float64)}
        with pytest.raises(NonFiniteError, match="the gradient of step 1 cannot be clipped: its norm is inf"):
            exchange.push([0], huge, {})
        assert torch.equal(read(exchange, 0)[WEIGHT], begun[WEIGHT])
        stages = [r.shard.share(0).stage for s in place.servers.values() for r in s.keeper.replicas.values()]
        assert set(stages) == {Stage.WHOLE}
        exchange.close()
