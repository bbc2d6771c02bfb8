"""A worker as a member of a job: joins, works, tells figures, leaves; and joins anew if it was given up meanwhile."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from safetensors.torch import save_file

from paceline.exchange.client.client import ServerExchange
from paceline.exchange.hogwild.exchange import HogwildExchange
from paceline.exchange.hogwild.keeper import attach
from paceline.exchange.interface import Dealer
from paceline.exchange.membership.member import Fenced, Member
from paceline.exchange.membership.seats import Role
from paceline.exchange.terms import Charter
from paceline.train.recipe import Recipe
from paceline.train.rundir import RunDirectory
from paceline.train.servers.rundir import buffers_of, exchange_of, work_of
from paceline.train.servers.worker.ahead import InThread
from paceline.train.servers.worker.compressing import choice, compressor_of, settled
from paceline.train.servers.worker.parts import Parts
from paceline.train.servers.worker.reading import ReadAhead
from paceline.train.servers.worker.records import RecordFile
from paceline.train.servers.worker.reports import EvaluationReport, TaskReport
from paceline.train.servers.worker.worker import Worker

_PATIENCE_S: Final = 10.0
"""What a worker that is told to leave has for the task in progress."""

log = logging.getLogger("paceline")


class Leaving:
    """Whether this process was asked to leave: SIGTERM or SIGINT. A second one, or lost patience, ends it at once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(0)  # as if it had left: nothing is wrong with it
        self.asked = True
        # What is dealt to a worker that just ends is dealt to others, so it may end in the middle of anything.
        timer = threading.Timer(_PATIENCE_S, os._exit, [0])
        timer.daemon = True
        timer.start()


class Reporter(RecordFile):
    """Writes what was done, and tells the coordinator figures of it.

    Args:
        path: see `RecordFile`.
        worker: its number.
        parts: of the worker.
        buffers: file for the module's buffers.
        number: returns the number of a task among those of all groups.
        tell: takes figures.
        figures: returns those of the exchange.
    """

    def __init__(
        self,
        path: Path,
        worker: int,
        parts: Parts,
        buffers: Path,
        number: Callable[[int], int],
        tell: Callable[[dict[str, Any]], None],
        figures: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(path, worker)
        self._parts = parts
        self._buffers = buffers
        self._number = number
        self._tell = tell
        self._figures = figures
        self._tasks = 0

    def on_task(self, report: TaskReport) -> None:
        """Write a line, and report."""
        super().on_task(replace(report, task=self._number(report.task)))
        self._tasks += 1
        mine = {"tasks": self._tasks, "task": report.task, "memory_bytes": report.memory_bytes}
        times = {"read_s": report.read_s, "compute_s": report.compute_s, "push_s": report.push_s}
        self._tell({**self._figures(), **mine, **{f"last_{name}": value for name, value in times.items()}})

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Write a line, and the module's buffers, which servers do not keep."""
        held = self._parts.state_of_buffers()
        if held:
            draft = self._buffers.with_suffix(f".{os.getpid()}")
            save_file(held, draft)
            draft.replace(self._buffers)
        super().on_evaluation(report)


def labour(run: RunDirectory, recipe: Recipe, group: int | None, parts: Parts, leaving: Leaving) -> None:
    """Work for the job of a run until it ends, or until this process is asked to leave.

    Raises:
        PacelineError: the job failed, or a task did.
    """
    directory = exchange_of(run, group)
    charter, secret = directory.read(), directory.read_secret()
    while not leaving.asked:
        member = Member.join(charter, secret, Role.WORKER)
        log.info("worker %d of the job", member.id)
        try:
            _work_as(member, charter, secret, parts, recipe, run, group, leaving)
            member.leave()
            return
        except Fenced:
            log.info("worker %d was given up while it stood still; it joins again, as a new one", member.id)
        finally:
            member.close()


def _work_as(
    member: Member,
    charter: Charter,
    secret: bytes,
    parts: Parts,
    recipe: Recipe,
    run: RunDirectory,
    group: int | None,
    leaving: Leaving,
) -> None:
    assert recipe.server is not None
    directory = exchange_of(run, group)
    exchange: ServerExchange | HogwildExchange
    dealer: Dealer = member
    if recipe.server.is_hogwild:
        exchange = HogwildExchange(attach(directory, member))
    else:

        def choose() -> str:
            with closing(ServerExchange(charter, member, secret)) as unlogged:
                return choice(unlogged)

        codec = settled(recipe.server.compression, directory, choose)
        exchange = ServerExchange(charter, member, secret, directory, compressor_of(codec, charter.job))
        dealer = exchange.logged(member)
    path = work_of(run, member.id, group)
    pieces, size = recipe.server.tasks_of_a_step, charter.job.pieces

    def number(task: int) -> int:
        return task // size * pieces + (group or 0) * size + task % size

    aside = InThread()
    reporter = Reporter(path, member.id, parts, buffers_of(run), number, member.report, exchange.figures)
    try:
        Worker(
            exchange,
            dealer,
            parts.computer,
            parts.portions,
            validation=parts.validation,
            ahead=charter.terms.ahead,
            read_ahead=ReadAhead(recipe.server.ahead),
            aside=aside,
            listener=reporter,
            stopping=lambda: leaving.asked,
        ).run()
    except Fenced:
        aside.end()  # whoever goes on uses the same samples and model
        raise
    finally:
        reporter.close()
        exchange.close()
