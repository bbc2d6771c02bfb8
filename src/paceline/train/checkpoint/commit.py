"""Committing a save: the ranks agree through files that a checkpoint is whole, without a word to each other.

Collectives would have to run beside those of training, in the same order on every rank. So each rank writes its tensors
and then its part of the manifest into the partial directory, or a note that it failed. The leader, the process of mesh
rank 0, waits for all of them in its background thread and renames the directory, or deletes it. The other ranks wait
for either. Needs a file system that all ranks see.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.train.checkpoint.directory import discard, final_path, newest_first, partial_path, publish
from paceline.train.checkpoint.manifest import MANIFEST, Entry, Manifest, Piece, merge, read_manifest, write_manifest
from paceline.train.checkpoint.pieces import Held
from paceline.train.checkpoint.tensorfile import Spec, write_tensors

_POLL_SECONDS = 0.02
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOTE_TRIES = 250  # five seconds in which another rank may free the space that a note needs


@dataclass(frozen=True)
class Save:
    """One save, the same on all ranks.

    Attributes:
        directory: where the checkpoints are.
        step: optimizer steps done.
        save_id: found in no other save.
        world: number of mesh ranks.
        timeout: seconds that a rank waits for the slowest one.
    """

    directory: Path
    step: int
    save_id: str
    world: int
    timeout: float

    @property
    def partial(self) -> Path:
        """Where the ranks write."""
        return partial_path(self.directory, self.step, self.save_id)

    @property
    def final(self) -> Path:
        """Where the checkpoint stands afterwards."""
        return final_path(self.directory, self.step)

    def data(self, rank: int) -> Path:
        """The tensors of a rank."""
        return self.partial / f"rank-{rank:05d}.safetensors"

    def part(self, rank: int) -> Path:
        """The part of the manifest of a rank; it is there once the tensors are."""
        return self.partial / f"rank-{rank:05d}.json"

    def note(self, rank: int) -> Path:
        """The note of a rank that failed, with the reason."""
        return self.partial / f"rank-{rank:05d}.failed"

    def not_saved(self, reason: str) -> CheckpointError:
        """Return the error for the training loop."""
        return CheckpointError(f"step {self.step} was not saved: {reason} Earlier checkpoints are untouched.")

    def refused(self, error: OSError) -> CheckpointError:
        """Return the error for the training loop when the file system refused something."""
        if error.errno in _FULL:
            free = shutil.disk_usage(self.directory).free
            return self.not_saved(
                f"the disk of {self.directory} is full ({free} bytes free). Free some space, or keep fewer checkpoints."
            )
        return self.not_saved(f"the file system refused to write {error.filename or self.partial}: {error.strerror}.")


def write_part(save: Save, rank: int, frame: Manifest, pieces: Sequence[Held]) -> None:
    """Write the tensors of a rank, then its part of the manifest.

    Args:
        save: the save.
        rank: mesh rank.
        frame: the part, still without files and tensors.
        pieces: what the rank owns, on the CPU, not changed by anybody until this returns.

    Raises:
        CheckpointError: the disk is full or not writable, or a tensor cannot be saved. The files of this rank are gone
            again, and the other ranks have been told.
    """
    tensors = {held.key: held.tensor for held in pieces}
    specs = {key: Spec(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    data = save.data(rank)
    try:
        save.partial.mkdir(parents=True, exist_ok=True)
        facts = write_tensors(data, specs, tensors.__getitem__, {"format": "pt"})
        entries = {
            held.key: Entry(
                Spec(held.tensor.dtype, held.shape), tuple(Piece(data.name, patch) for patch in held.patches)
            )
            for held in pieces
        }
        write_manifest(save.part(rank), replace(frame, files={data.name: facts}, tensors=entries))
    except (OSError, CheckpointError) as error:
        failure = save.refused(error) if isinstance(error, OSError) else save.not_saved(str(error))
        for path in save.partial.glob(f"{data.stem}.*"):
            path.unlink(missing_ok=True)  # frees the space that the note needs
        _leave_note(save.note(rank), str(failure))
        raise failure from error


def commit(save: Save, ranks: Sequence[int], failure: CheckpointError | None) -> None:
    """Wait for the parts of all ranks and make the checkpoint of them. For the leader.

    Args:
        save: the save.
        ranks: the leader's own ranks, which have left parts or failed.
        failure: why one of them failed.

    Raises:
        CheckpointError: a rank failed or did not come in time, the pieces do not fit together, or the file system
            refused. The partial directory is gone.
    """
    try:
        if failure is not None and not save.partial.exists():
            raise failure  # not even the directory could be made: nobody else will get far
        _await_all(save, ranks)
        if failure is not None:
            raise failure
        reasons = sorted(path.read_text() for path in save.partial.glob("*.failed"))
        if reasons:
            raise CheckpointError(reasons[0] or save.not_saved("a rank could not write.").args[0])
        newest = newest_first(save.directory)[:1]
        sequence = 1 + max((manifest.sequence for _, manifest in newest), default=0)
        parts = [read_manifest(save.part(rank)) for rank in range(save.world)]
        write_manifest(save.partial / MANIFEST, merge(parts, sequence))
        for rank in range(save.world):
            save.part(rank).unlink()
        publish(save.partial, save.final)
    except (OSError, CheckpointError) as error:
        if save.partial.exists():
            with contextlib.suppress(OSError):  # the first error is the one that matters
                discard(save.partial)
        if isinstance(error, OSError):
            raise save.refused(error) from error
        raise


def await_commit(save: Save) -> None:
    """Wait until the leader has made the checkpoint. For all other processes.

    Raises:
        CheckpointError: it was abandoned, or the leader did not come in time.
    """
    deadline = time.monotonic() + save.timeout
    while save.partial.exists():
        for path in _notes(save):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile; found out below
                raise CheckpointError(path.read_text() or save.not_saved("a rank could not write.").args[0])
        if time.monotonic() > deadline:
            raise save.not_saved(f"the process of rank 0 did not commit it within {save.timeout:.0f} s.")
        time.sleep(_POLL_SECONDS)
    try:
        committed = read_manifest(save.final / MANIFEST).save_id == save.save_id
    except CheckpointError:
        committed = False
    if not committed:
        raise save.not_saved("another rank could not write its part; its own error says why.")


def _await_all(save: Save, ranks: Sequence[int]) -> None:
    """Return when every rank but `ranks`, which are ours, has left its part or a note."""
    deadline = time.monotonic() + save.timeout
    while True:
        names = set(os.listdir(save.partial))
        left = (rank for rank in range(save.world) if save.part(rank).name not in names)
        late = [rank for rank in left if save.note(rank).name not in names and rank not in ranks]
        if not late:
            return
        if time.monotonic() > deadline:
            shown = ", ".join(map(str, late[:8])) + (", ..." if len(late) > 8 else "")
            raise save.not_saved(
                f"rank {shown} did not finish writing within {save.timeout:.0f} s. Is it alive, and does it see "
                f"{save.directory}?"
            )
        time.sleep(_POLL_SECONDS)


def _leave_note(path: Path, text: str) -> None:
    """Tell the other ranks, on a disk that may be full to the last byte: an empty note is good enough."""
    for attempt in range(_NOTE_TRIES):
        try:
            draft = path.with_suffix(".draft")
            draft.write_text(text if attempt == 0 else "")
            os.replace(draft, path)
            return
        except OSError as error:
            if attempt > 0 and error.errno not in _FULL:
                return  # the leader has given up already, or will find this rank missing
            time.sleep(_POLL_SECONDS)


def _notes(save: Save) -> list[Path]:
    """Return the notes of ranks that failed; none where the leader has just renamed or deleted the directory."""
    try:
        return sorted(save.partial.glob("*.failed"))
    except FileNotFoundError:
        return []
