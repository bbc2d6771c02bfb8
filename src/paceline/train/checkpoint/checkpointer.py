"""Checkpointer: saves while training goes on, and restores bit for bit or into any other layout."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.train.checkpoint.commit import Save, await_commit, commit, write_part
from paceline.train.checkpoint.directory import broken_files, newest_first, prune, sweep
from paceline.train.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from paceline.train.checkpoint.misfit import compare, refuse_if
from paceline.train.checkpoint.optimizer import describe, misfits, optimizer_pieces, prepare
from paceline.train.checkpoint.peers import Peers
from paceline.train.checkpoint.pieces import ShardedModule, model_key, model_pieces, saved_shards
from paceline.train.checkpoint.plain import plain
from paceline.train.checkpoint.randomness import random_key, random_pieces, restore_states
from paceline.train.checkpoint.reading import Reader
from paceline.train.checkpoint.staging import Snapshot, Staging
from paceline.train.checkpoint.tensorfile import Spec

log = logging.getLogger(__name__)


class Checkpointer:
    """Checkpoints of a module and its optimizer in one directory that all ranks see.

    Constructing and restoring are collectives; saving is not, but all ranks must save the same steps in the same order.
    Only one job at a time may save into a directory.

    Args:
        directory: where the checkpoints are; made when missing.
        module: what `paceline.parallelize` returned.
        optimizer: over `module.parameters()`.
        keep: how many checkpoints stay, at least 1.
        timeout: seconds that the fastest rank waits, in the background, for the slowest.

    Raises:
        CheckpointError: `keep` is below one, or the directory cannot be made.
    """

    def __init__(
        self,
        directory: Path | str,
        module: ShardedModule,
        optimizer: Optimizer,
        keep: int = 2,
        timeout: float = 600.0,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"keep is {keep}; at least 1 checkpoint must stay.")
        self.directory = Path(directory)
        self._module = module
        self._optimizer = optimizer
        self._keep = keep
        self._timeout = timeout
        self._peers = Peers.of(module)
        self._leads = self._peers.index == 0
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._saves = 0
        if self._leads:
            sweep(self.directory)
        # No two runs share this number, so that a rank's part from a killed run is never taken for one of this run.
        self._run = self._peers.from_first([secrets.randbits(48)])[0]
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the directory {self.directory}: {error.strerror}.") from error

    def save(self, step: int, extra: dict[str, Any], block: bool = False) -> None:
        """Copy the state as it is now, and write it in the background.

        Returns once everything this rank writes is copied. A save still running is waited for first.

        Args:
            step: optimizer steps done.
            extra: plain values that `restore` gives back, those of rank 0; tuples come back as lists.
            block: wait until the checkpoint is whole.

        Raises:
            CheckpointError: the save before failed (and this one was not begun), `extra` is not plain, or the
                optimizer keeps state that cannot be split.
        """
        self.wait()
        pieces = [
            *model_pieces(self._module),
            *optimizer_pieces(self._module, self._optimizer),
            *random_pieces(self._module),
        ]
        save_id = f"{self._run:012x}_{self._saves}"
        frame = Manifest(
            step=step,
            save_id=save_id,
            sequence=0,
            mesh=str(self._module.mesh),
            files={},
            tensors={},
            optimizer=describe(self._module, self._optimizer),
            state_names=dict(self._module.state_names),
            extra=plain(extra, "extra"),
        )
        snapshot = self._staging.take([held for held in pieces if held.owner])
        self._saves += 1
        save = Save(self.directory, step, save_id, self._module.mesh.size, self._timeout)
        # A daemon: when training dies, the process must not linger for ranks that will never come.
        self._thread = threading.Thread(
            target=self._run_save, args=(save, frame, snapshot), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()
        if block:
            self.wait()

    def wait(self) -> None:
        """Wait until the save that is running is whole on all ranks.

        Raises:
            CheckpointError: it failed; told once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait for the save that is running and free the buffers.

        Raises:
            CheckpointError: it failed.
        """
        try:
            self.wait()
        finally:
            self._staging.clear()

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint, the same on all ranks; broken ones are named in the log. A collective."""
        found = self._newest()
        return found[0] if found else None

    def restore(self, path: Path | str | None = None) -> dict[str, Any]:
        """Load a checkpoint of any mesh: parameters, buffers, optimizer and random number generators. A collective.

        Each rank reads just its own pieces. Generators continue where those of the same rank stopped; a rank that the
        saved mesh did not have takes rank 0's. Nothing is changed when the checkpoint does not fit.

        Args:
            path: a checkpoint; the newest whole one of the directory when None.

        Returns:
            `extra` as given to `save`.

        Raises:
            CheckpointError: there is none, it is broken, or it does not fit the module or the optimizer.
        """
        self.wait()
        if path is not None:
            path = Path(path)
            manifest = self._whole(path)
        elif found := self._newest():
            path, manifest = found
        else:
            raise CheckpointError(f"{self.directory} has no whole checkpoint to restore.")
        self._check_fit(path, manifest)
        with Reader(path, manifest) as reader:
            reader.fill(model_pieces(self._module))
            reader.fill(prepare(manifest, self._module, self._optimizer))
            restore_states(self._saved_generators(reader, manifest), self._module)
        extra: dict[str, Any] = plain(manifest.extra, "extra")
        return extra

    def _run_save(self, save: Save, frame: Manifest, snapshot: Snapshot) -> None:
        """Write, then lead or await the commit; the thread's whole life."""
        try:
            snapshot.ready()
            failure = self._write_parts(save, frame, snapshot)
            if self._leads:
                commit(save, self._module.ranks, failure)
                self._prune()
            elif failure is not None:
                raise failure
            else:
                await_commit(save)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:  # a thread has nobody to raise to: training must hear of any fault
            self._failure = CheckpointError(f"step {save.step} was not saved: {type(error).__name__}: {error}.")
            self._failure.__cause__ = error

    def _write_parts(self, save: Save, frame: Manifest, snapshot: Snapshot) -> CheckpointError | None:
        """Write the parts of all ranks of this process, also after one failed: the leader waits for each."""
        failure = None
        for rank in self._module.ranks:
            try:
                # What is the same on all ranks is written once.
                own = (
                    frame
                    if rank == 0
                    else replace(frame, optimizer=self._of_stage(rank, frame), state_names={}, extra={})
                )
                write_part(save, rank, own, [held for held in snapshot.pieces if held.rank == rank])
            except CheckpointError as error:
                failure = failure or error
        return failure

    def _of_stage(self, rank: int, frame: Manifest) -> Mapping[str, Any]:
        """What a rank other than the first has to say of its optimizer: processes of stages have other parameters."""
        is_other_stage = self._module.mesh.stage_ranks > 1 and rank == self._module.ranks[0]
        return frame.optimizer if is_other_stage else {}

    def _prune(self) -> None:
        try:
            prune(self.directory, self._keep)
        except OSError as error:
            log.warning("cannot delete an old checkpoint of %s: %s", self.directory, error)

    def _newest(self) -> tuple[Path, Manifest] | None:
        """Return the newest checkpoint that all processes find whole."""
        listed = newest_first(self.directory) if self._leads else []
        # Names travel as numbers: the step, and whether it is the one that was replaced.
        numbers = [number for path, manifest in listed for number in (manifest.step, int(path.suffix == ".replaced"))]
        shared = self._peers.from_first(numbers)
        for step, replaced in zip(shared[::2], shared[1::2], strict=True):
            path = self.directory / f"step-{step:08d}{'.replaced' if replaced else ''}"
            try:
                return path, self._whole(path)
            except CheckpointError as error:
                log.warning("skipping a broken checkpoint: %s", error)
        return None

    def _whole(self, path: Path) -> Manifest:
        """Return the manifest of a checkpoint whose files are as it says; the processes share the work of reading them.

        Raises:
            CheckpointError: any process finds it broken; raised in all of them.
        """
        faults = []
        try:
            manifest = read_manifest(path / MANIFEST)
            faults = broken_files(path, manifest, sorted(manifest.files)[self._peers.index :: self._peers.count])
        except CheckpointError as error:
            faults = [str(error)]
        if not self._peers.all_true(not faults):
            raise CheckpointError("; ".join(faults) or f"another rank finds {path} broken; its own message says where.")
        return manifest

    def _check_fit(self, path: Path, manifest: Manifest) -> None:
        prefix = model_key("")
        given = {
            key.removeprefix(prefix): entry.spec for key, entry in manifest.tensors.items() if key.startswith(prefix)
        }
        needed = {s.name: Spec(s.tensor.dtype, tuple(s.shape)) for s in saved_shards(self._module)}
        faults = compare(given, needed) + misfits(manifest, self._module, self._optimizer)
        refuse_if(faults, str(path), "Restore it into the module and optimizer that saved it; any mesh will do.")

    def _saved_generators(self, reader: Reader, manifest: Manifest) -> dict[str, Any]:
        rank = self._module.ranks[0]
        prefix = random_key(rank if random_key(rank, "cpu") in manifest.tensors else 0, "")
        keys = [key for key in manifest.tensors if key.startswith(prefix)]
        return {key.removeprefix(prefix): reader.read(key) for key in keys}
