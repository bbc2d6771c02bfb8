"""The manifest: what a checkpoint holds, as JSON with a checksum over itself.

Every rank writes a part, which is a manifest of its own pieces only; merging the parts of all ranks gives the manifest
of the checkpoint. Nothing here reads or writes tensors.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.placement.boxes import Box, Patch
from paceline.train.checkpoint.cover import flaw
from paceline.train.checkpoint.tensorfile import DTYPES, FileFacts, Spec, dtype_code

FORMAT = "paceline-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, the file it is in, and where it is in what that file holds of the tensor."""

    file: str
    patch: Patch


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint: its type, global shape and pieces."""

    spec: Spec
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint, or one rank's part of it, holds.

    Attributes:
        step: optimizer steps done.
        save_id: names this one save; two saves of the same step differ in it.
        sequence: counts the saves of a directory; the newest checkpoint has the greatest. Steps would not do: a run
            that went back to step 50 is newer than the step 100 it left behind.
        mesh: the mesh that saved it, for people.
        files: length and checksum by file name.
        tensors: by name; see `state.py` for the names.
        optimizer: groups and the state that is not tensors; see `optimizer.py`.
        state_names: every name of the user's `state_dict()` and the name its value is saved under (tied names share).
        extra: the caller's own values.
    """

    step: int
    save_id: str
    sequence: int
    mesh: str
    files: Mapping[str, FileFacts]
    tensors: Mapping[str, Entry]
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    state_names: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the opposite of `from_json`."""
        files = {name: {"bytes": facts.bytes, "crc32": facts.crc32} for name, facts in self.files.items()}
        return {
            "step": self.step,
            "save_id": self.save_id,
            "sequence": self.sequence,
            "mesh": self.mesh,
            "files": files,
            "tensors": {name: _entry_to_json(name, entry) for name, entry in self.tensors.items()},
            "optimizer": self.optimizer,
            "state_names": self.state_names,
            "extra": self.extra,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Manifest:
        """Read what `to_json` gave."""
        files = {name: FileFacts(facts["bytes"], facts["crc32"]) for name, facts in body["files"].items()}
        tensors = {name: _entry_from_json(entry) for name, entry in body["tensors"].items()}
        return cls(**{**body, "files": files, "tensors": tensors})


def merge(parts: Iterable[Manifest], sequence: int) -> Manifest:
    """Merge the parts of all ranks, rank 0's first; what is about neither tensors nor the optimizer is that one's.

    Raises:
        CheckpointError: the pieces of a tensor leave a hole, overlap, or disagree on its type or shape.
    """
    parts = list(parts)
    files: dict[str, FileFacts] = {}
    tensors: dict[str, Entry] = {}
    for part in parts:
        files.update(part.files)
        for name, entry in part.tensors.items():
            seen = tensors.get(name, Entry(entry.spec, ()))
            if seen.spec != entry.spec:
                raise CheckpointError(f"not saved: ranks disagree on '{name}': {seen.spec} and {entry.spec}.")
            tensors[name] = Entry(entry.spec, seen.pieces + entry.pieces)
    for name, entry in tensors.items():
        if fault := flaw((piece.patch.whole for piece in entry.pieces), entry.spec.shape):
            raise CheckpointError(
                f"not saved: the pieces of '{name}' ({entry.spec}) are no exact cover: {fault}. "
                "Exactly one rank must own each piece."
            )
    optimizer = _together([part.optimizer for part in parts if part.optimizer])
    return replace(parts[0], sequence=sequence, files=files, tensors=tensors, optimizer=optimizer)


def _together(described: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Put together what ranks say about an optimizer of which each has some parameters, as stages have.

    Groups are the same where their hyper-parameters are; of several such groups of one rank, in their order.
    """
    if len(described) < 2:
        return described[0] if described else {}
    names: dict[tuple[str, int], set[str]] = {}
    hyper: dict[tuple[str, int], Any] = {}
    state: dict[str, Any] = {}
    for found in described:
        state.update(found["state"])
        seen: dict[str, int] = {}
        for group in found["groups"]:
            text = json.dumps(group["hyper"], sort_keys=True)
            key = text, seen.get(text, 0)
            seen[text] = key[1] + 1
            names.setdefault(key, set()).update(group["names"])
            hyper[key] = group["hyper"]
    groups = [{"names": sorted(members), "hyper": hyper[key]} for key, members in names.items()]
    return {**described[0], "groups": groups, "state": state}


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest or a part so that it appears at `path` whole or not at all, and is on the disk.

    Raises:
        OSError: the disk is full or not writable.
    """
    body = _canonical(manifest.to_json())
    text = f'{{"format":"{FORMAT}","version":{VERSION},"crc32":{zlib.crc32(body.encode())},"body":{body}}}'
    draft = path.with_name(path.name + ".draft")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest or a part.

    Raises:
        CheckpointError: it is missing, truncated, changed, of a later version or not ours.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is not a Paceline checkpoint: it has no {path.name}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by Paceline: it lacks the format '{FORMAT}'.")
    if document.get("version") not in range(1, VERSION + 1):
        raise CheckpointError(
            f"{path} has format version {document.get('version')}; this Paceline reads versions up to {VERSION}. "
            "Use the Paceline that wrote it to export safetensors, and load those."
        )
    body = document.get("body")
    if not isinstance(body, dict) or zlib.crc32(_canonical(body).encode()) != document.get("crc32"):
        raise CheckpointError(f"{path} is damaged: its text does not have the checksum it names.")
    return Manifest.from_json(body)


def _canonical(body: Mapping[str, Any]) -> str:
    """Return the one text of `body`; Python prints floats so that they read back exactly."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _entry_to_json(name: str, entry: Entry) -> dict[str, Any]:
    pieces = [
        {
            "file": piece.file,
            "offset": list(piece.patch.whole.offset),
            "at": list(piece.patch.local.offset),
            "shape": list(piece.patch.whole.shape),
        }
        for piece in entry.pieces
    ]
    return {"dtype": dtype_code(entry.spec.dtype, name), "shape": list(entry.spec.shape), "pieces": pieces}


def _entry_from_json(entry: Mapping[str, Any]) -> Entry:
    pieces = []
    for piece in entry["pieces"]:
        shape = tuple(piece["shape"])
        at = piece.get("at", [0] * len(shape))  # in version 1 a file held one box of a tensor, and nothing else of it
        patch = Patch(Box(tuple(piece["offset"]), shape), Box(tuple(at), shape))
        pieces.append(Piece(piece["file"], patch))
    return Entry(Spec(DTYPES[entry["dtype"]], tuple(entry["shape"])), tuple(pieces))
