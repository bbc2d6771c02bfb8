"""A resume is there in whole or not at all, at whatever moment the process that makes it dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import RecipeError
from paceline.exchange.shard.snapshot import load_shard
from paceline.exchange.terms import Terms
from paceline.train.rundir import RunDirectory
from paceline.train.servers.groups.ledger import Ledger
from paceline.train.servers.recipe.section import ServerSection
from paceline.train.servers.rundir import Part, part_of, parts_before
from paceline.train.servers.supervisor.renewal import renewed
from paceline.train.servers.supervisor.setup import prepare
from tests.train.servers import test_bridge
from tests.train.servers.test_cuts import JOB, Disk

SERVER = ServerSection(deployment="groups", workers=2, groups=2, sync_every=1, shards=2)
CHANGING = ("mkdir", "link", "rename", "replace", "unlink", "rmdir")
EACH = 40  # with 1 it takes a minute, and passes


class Deaths:
    """Keeps what is on the disk just before a change of it: whatever changes the run's directory itself, and some of
    the changes below."""

    def __init__(self, root: Path, kept: Path, patch: pytest.MonkeyPatch) -> None:
        self._root, self._kept = root, kept
        self._seen: set[frozenset[str]] = set()
        self._changes = 0
        self._busy = False
        self.states: list[Path] = []
        for name in CHANGING:
            patch.setattr(os, name, self._first(getattr(os, name)))
        patch.setattr(os, "fsync", self._first(lambda _: None))  # which whoever dies does not miss

    def _first(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **named: Any) -> Any:
            if not self._busy:
                self._busy = True
                self._keep()
                self._busy = False
            return change(*arguments, **named)

        return changed

    def _keep(self) -> None:
        names = frozenset(path.name for path in self._root.iterdir())
        self._changes += 1
        if names not in self._seen or self._changes % EACH == 0:
            self._seen.add(names)
            state = self._kept / str(len(self.states))
            shutil.copytree(self._root, state, copy_function=os.link)  # files are replaced, never changed
            self.states.append(state)


def gone_on(root: Path) -> dict[str, Tensor]:
    """Resume; return all that all servers begin with."""
    made = prepare(RunDirectory(root), SERVER, JOB, Terms(tasks=100), {}, resume=True)
    found: dict[str, Tensor] = {}
    for number, (directory, charter) in enumerate([made.main, *made.groups]):
        assert directory.read() == charter
        for shard in range(JOB.shards):
            state = load_shard(directory.snapshot(charter.terms.restored), charter.job, shard).state()
            found |= {f"{number}.{shard}.{name}": tensor for name, tensor in state.tensors.items()}
    for directory, _ in made.groups:
        found[f"meetings of {directory.root.name}"] = torch.tensor(Ledger(directory.root).last().base)
    return found


def test_whenever_a_resume_dies_the_next_one_goes_on_from_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_bridge, "JOB", JOB)
    root = tmp_path / "run"
    disk = Disk(root)
    (root / "config.yaml").write_text("seed: 3\n")
    for group in (0, 1, 0):
        disk.move(group, 1.0 + group)
        disk.world.meet(group)
    for which in range(3):
        disk.snapshot(which)
    disk.move(0, 1.0)
    with monkeypatch.context() as patch:
        deaths = Deaths(root, tmp_path / "deaths", patch)
        expected = gone_on(root)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    assert [int(expected[f"meetings of {group}"]) for group in range(2)] == [2, 1]
    names = [{path.name for path in state.iterdir()} - {"config.yaml"} for state in deaths.states]
    assert {"exchange", "exchange.draft"} in names and {"exchange", "exchange.next"} in names
    assert {"exchange-before-1", "exchange.next"} in names and {"exchange-before-1", "exchange"} in names
    for state, there in zip(deaths.states, names, strict=True):
        found = gone_on(state)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), there
        run = RunDirectory(state)
        was_written = len(there & {"exchange.next", "exchange-before-1"})
        assert len(parts_before(run)) == (2 if was_written else 1)
        left = {path.name for path in state.iterdir()}
        assert left == {"config.yaml", *(part.root.name for part in (part_of(run), *parts_before(run)))}
        assert all(part.groups() == [0, 1] and part.recipe.exists() for part in (part_of(run), *parts_before(run)[1:]))


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "exchange").mkdir()
    with pytest.raises(RecipeError, match="for a reason"), renewed(run) as draft:
        (draft.root / "half").touch()
        raise RecipeError("for a reason")
    assert not parts_before(run) and not list(part_of(run).root.iterdir())
    with renewed(run) as draft:
        assert not list(draft.root.iterdir())
        (draft.root / "whole").touch()
    assert parts_before(run) == [Part(tmp_path / "exchange-before-1")] and (part_of(run).root / "whole").exists()
