"""The supervisor of a run with servers: starts its processes, watches them, and makes a trained module of what is left.

It holds no parameters while the run goes on, and is on no path between workers and servers.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console

from paceline.errors import RankFailed, RecipeError
from paceline.runtime.job.signals import NotedSignals
from paceline.train.callbacks import CheckpointReport, EndReport, MembersReport, StartReport
from paceline.train.model import build_module
from paceline.train.recipe import Recipe, to_yaml
from paceline.train.rundir import RunDirectory, write_whole
from paceline.train.servers.processes.children import Children
from paceline.train.servers.processes.nursery import Nursery
from paceline.train.servers.recipe.job import job_of, steps_of, terms_of
from paceline.train.servers.recipe.section import ServerSection
from paceline.train.servers.rundir import exchange_of, log_of
from paceline.train.servers.supervisor.clusters import Clusters
from paceline.train.servers.supervisor.finish import finish, is_unwritten
from paceline.train.servers.supervisor.setup import prepare
from paceline.train.servers.supervisor.stopping import stop_by_signal, stop_unwritten
from paceline.train.servers.supervisor.workforce import Workforce
from paceline.train.servers.watch.progress import Progress
from paceline.train.servers.watch.status import Status
from paceline.train.servers.worker.parts import check_validation, named_parameters, open_sources
from paceline.train.startup import Speaker, resume_command

_POLL_S: Final = 0.05
_LOOK_S: Final = 0.5
"""Between questions to the coordinator."""
_PATIENCE_S: Final = 5.0
"""How long a job may wait, for processes that are starting, before that is said."""
_FIGURES_S: Final = 2.0
"""Between lines of figures."""
_GRACE_S: Final = 20.0
"""What workers have to end once the job is done."""


def supervise(recipe: Recipe, out: Path, resume: bool = False, nursery: Nursery | None = None) -> EndReport:
    """Train with parameters on servers.

    Args:
        recipe: with a section `server`.
        out: the run directory.
        resume: go on from its newest snapshot.
        nursery: where servers and workers are started; None: each loads PyTorch itself.

    Raises:
        SystemExit: a signal ended the run early, with a snapshot; 130 for Ctrl-C, 143 for SIGTERM.
        PacelineError: bad input, or the training failed.
    """
    run = RunDirectory(out)
    console = Console()
    with run.logging_to(log_of(run, "supervisor")) as log, _aloud(log, console):
        try:
            report = _Run(recipe, run, Speaker(console, log), nursery).train(resume)
        except Exception as error:  # also to the log, which outlives the terminal
            log.error("ended by %s: %s", type(error).__name__, error)
            raise
    if report.signal is not None:
        raise SystemExit(128 + report.signal)
    return report


class _Aloud(logging.Handler):
    """Says what is logged on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), markup=False)


@contextmanager
def _aloud(log: logging.Logger, console: Console) -> Iterator[None]:
    """Say warnings on the terminal too."""
    handler = _Aloud(console)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Run:
    """The parts of a run."""

    def __init__(self, recipe: Recipe, run: RunDirectory, speaker: Speaker, nursery: Nursery | None) -> None:
        if recipe.server is None:
            raise RecipeError("the recipe has no section `server`.")
        self.recipe = recipe
        self.server: ServerSection = recipe.server
        self.run = run
        self.speaker = speaker
        self.nursery = nursery
        self.began = time.monotonic()

    def train(self, resume: bool) -> EndReport:
        run, recipe = self.run, self.recipe
        run.root.mkdir(parents=True, exist_ok=True)
        write_whole(run.config, to_yaml(recipe))
        with self.speaker.phase("data"):
            source, held_out = open_sources(recipe)
            check_validation(recipe, held_out)
        with self.speaker.phase("model"):
            module = build_module(recipe)
            steps = steps_of(recipe, len(source))
            job = job_of(recipe, module, steps)
        terms = terms_of(recipe, steps)
        if resume and is_unwritten(run, terms, self.server.groups if self.server.deployment == "groups" else 0):
            self.speaker.say("all steps are done, and the trained module is yet to be written")
            total = terms.tasks // job.pieces * (self.server.average_every or 1)
            report = EndReport(total, total, None, time.monotonic() - self.began)
            finish(recipe, run, exchange_of(run), exchange_of(run).read().job, module, self.speaker, report)
            return report
        with self.speaker.phase("snapshot"):
            dense = {name: v for name, v in named_parameters(module).items() if name not in self.server.tables}
            made = prepare(run, self.server, job, terms, dense, resume=resume)
        with Children(run.root / "logs", self.nursery) as children, NotedSignals() as signals:
            clusters = Clusters(made, children, self.server)
            workforce = Workforce(run, self.server, clusters.groups, children)
            report, saved = self._watch(clusters, workforce, len(source), signals)
            children.end(signal.SIGTERM, 1.0, children.named("coordinator"))
        if report.signal is not None:
            self._say_stopped(report, report.signal, saved)
            return report
        directory, charter = made.main
        finish(recipe, run, directory, charter.job, module, self.speaker, report)
        return report

    def _watch(
        self, clusters: Clusters, workforce: Workforce, samples: int, signals: NotedSignals
    ) -> tuple[EndReport, bool]:
        """Start everything, and return when the job is done or was stopped; also whether all is saved."""
        charters = [group.charter for group in clusters.groups]
        progress = Progress(self.recipe, self.run, charters, samples, self.speaker)
        parameters = sum(table.count for table in clusters.main.charter.job.tables if hasattr(table, "count"))
        ended, saved = None, True
        try:
            clusters.start()
            workforce.start()
            progress.start(StartReport(progress.steps.done, progress.total, parameters))
            try:
                status = self._until_done(clusters, workforce, progress, signals)
            except OSError as error:
                raise stop_unwritten(error, clusters, workforce, signals) from error
            if not status.finished:
                ended, saved = signals.received[0], stop_by_signal(clusters, workforce, signals)
            workforce.wait(_GRACE_S)
            with self._warned():
                progress.take()
            report = EndReport(progress.steps.done, progress.total, ended, time.monotonic() - self.began)
            with self._warned():
                if ended is not None and saved:
                    progress.checkpoint(CheckpointReport(report.step, clusters.main.directory.snapshots, 0.0))
                figures = status.last_figures(clusters.status())
                if figures:
                    progress.members(MembersReport(report.step, figures))
                progress.end(report)
            return report, saved
        finally:
            with self._warned():
                progress.close()
            clusters.close()

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """Go on without the last figures where there is no room for them: what was learnt is yet to be written."""
        try:
            yield
        except OSError as error:
            self.speaker.log.warning("the last figures cannot be written: %s", error)

    def _until_done(
        self, clusters: Clusters, workforce: Workforce, progress: Progress, signals: NotedSignals
    ) -> Status:
        looked = shown = 0.0
        said, since = "", time.monotonic()
        status = Status()
        while not status.finished and not signals.received:
            time.sleep(_POLL_S)
            progress.take()
            for line in clusters.news():  # before who has joined and ended is forgotten
                self.speaker.say(line)
            workforce.look()
            clusters.look()
            now = time.monotonic()
            if now - looked < _LOOK_S and workforce.size:
                continue
            looked, status = now, clusters.status()
            if status.failed:
                raise RankFailed(f"the job failed: {status.failed}")
            since = since if status.waiting else now
            if status.waiting and status.waiting != said and now - since > _PATIENCE_S:
                said = status.waiting
                self.speaker.say(f"waiting {said}")
            elif said and not status.waiting:
                said, since = "", time.monotonic()
                self.speaker.say("the job goes on")
            if status.figures and now - shown > _FIGURES_S:
                shown = now
                progress.members(MembersReport(progress.steps.done, status.figures))
        return status

    def _say_stopped(self, report: EndReport, number: int, saved: bool) -> None:
        where = f"stopped after step {report.step} of {report.steps}"
        saved_it = "and saved it" if saved else "at once, by a second signal: what the last snapshot lacks is lost"
        self.speaker.say(f"{signal.Signals(number).name}: {where}, {saved_it}. To go on:")
        self.speaker.say(f"  {resume_command(self.run)}")
