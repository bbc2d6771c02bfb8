"""The directory of checkpoints: names, order, what is whole, what may go.

    step-00000100/                          a checkpoint; it came into being by one rename
    step-00000100.partial-<save>/           being written, or left behind by a killed save
    step-00000100.replaced/                 the earlier checkpoint of a step that was saved again
    step-00000050.trash-<process>/          being deleted
    step-00000100.unknown-<...>/            something not ours that stood where a checkpoint had to go; never deleted

Knows files only, nothing of modules or ranks. One job at a time may write to a directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from paceline.durable import settle
from paceline.errors import CheckpointError
from paceline.train.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from paceline.train.checkpoint.tensorfile import file_facts

log = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"step-\d{8,}(\.replaced)?")
_LEFTOVER = re.compile(r"step-\d{8,}(\.replaced)?\.(partial|trash)-\w+")


def final_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of `step` stands once it is whole."""
    return directory / f"step-{step:08d}"


def partial_path(directory: Path, step: int, save_id: str) -> Path:
    """Return where the ranks write before that."""
    return directory / f"step-{step:08d}.partial-{save_id}"


def latest(directory: Path | str) -> Path | None:
    """Return the newest whole checkpoint, or None; broken ones are skipped and named in the log.

    Every file of the candidate is read once to compare its checksum.
    """
    for path, manifest in newest_first(Path(directory)):
        faults = broken_files(path, manifest, manifest.files)
        if not faults:
            return path
        log.warning("skipping a broken checkpoint: %s", "; ".join(faults))
    return None


def newest_first(directory: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints that have a sound manifest, newest save first; others are named in the log."""
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if _CHECKPOINT.fullmatch(path.name):
            try:
                found.append((path, read_manifest(path / MANIFEST)))
            except CheckpointError as error:
                log.warning("skipping a broken checkpoint: %s", error)
    return sorted(found, key=lambda item: item[1].sequence, reverse=True)


def broken_files(path: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return what is wrong with the files `names` of a checkpoint, one sentence each."""
    faults = []
    for name in names:
        expected = manifest.files[name]
        try:
            size = (path / name).stat().st_size
            if size != expected.bytes:
                faults.append(f"{path / name} has {size} bytes instead of {expected.bytes}: it is truncated or foreign")
            elif file_facts(path / name) != expected:
                faults.append(f"{path / name} is damaged: its bytes do not have the checksum in {MANIFEST}")
        except OSError as error:
            faults.append(f"{path / name} cannot be read: {error.strerror}")
    return faults


def publish(partial: Path, final: Path) -> None:
    """Give a finished partial directory its final name; a kill at any moment leaves a whole checkpoint.

    Raises:
        OSError: the file system refuses.
    """
    settle(partial)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists() and not _is_ours(final):
        aside = final.with_name(f"{final.name}.unknown-{partial.name.partition('-')[2]}")
        log.warning("%s is no sound checkpoint of ours; moving it to %s", final, aside.name)
        os.rename(final, aside)
    elif final.exists():
        if replaced.exists():
            discard(replaced)
        os.rename(final, replaced)  # still counts as a checkpoint, should the next line never come
    os.rename(partial, final)
    settle(final.parent)
    if replaced.exists():
        with contextlib.suppress(OSError):  # the new one is whole: an old one too many is no failure
            discard(replaced)


def prune(directory: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints. What has no sound manifest is not ours and stays."""
    for path, _ in newest_first(directory)[keep:]:
        discard(path)


def sweep(directory: Path) -> None:
    """Delete what killed saves and killed deletions left behind."""
    for path in directory.iterdir() if directory.is_dir() else []:
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Delete a directory so that no moment shows half of it under its name."""
    if ".partial-" in path.name:
        trash = path.with_name(path.name.replace(".partial-", ".trash-"))
    else:
        trash = path.with_name(f"{path.name}.trash-{os.getpid()}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    try:
        read_manifest(path / MANIFEST)
    except CheckpointError:
        return False
    return True
