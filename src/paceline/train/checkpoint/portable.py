"""Plain safetensors under the names of the user's `state_dict()`: what the rest of the world reads and writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.durable import settle
from paceline.errors import CheckpointError
from paceline.placement.boxes import Patch
from paceline.train.checkpoint.directory import broken_files
from paceline.train.checkpoint.manifest import MANIFEST, read_manifest
from paceline.train.checkpoint.misfit import compare, refuse_if
from paceline.train.checkpoint.pieces import ShardedModule, model_key, saved_shards
from paceline.train.checkpoint.reading import Reader
from paceline.train.checkpoint.tensorfile import Spec, TensorFiles, write_tensors

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def export_safetensors(module: ShardedModule, path: Path | str) -> None:
    """Write the whole module to one safetensors file. A collective; the process of rank 0 writes.

    Tied parameters are written under each of their names, so that `user_module.load_state_dict(load_file(path))` works.

    Raises:
        CheckpointError: the file cannot be written, or a type has no place in safetensors.
    """
    state = module.full_state_dict()
    if 0 in module.ranks:
        specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
        _write(Path(path), specs, state.__getitem__)


def export_checkpoint(checkpoint: Path | str, path: Path | str) -> None:
    """Write the module of a checkpoint to one safetensors file, one tensor in memory at a time; needs no module.

    Raises:
        CheckpointError: the checkpoint is broken, or the file cannot be written.
    """
    checkpoint = Path(checkpoint)
    manifest = read_manifest(checkpoint / MANIFEST)
    if faults := broken_files(checkpoint, manifest, manifest.files):
        raise CheckpointError(f"{'; '.join(faults)}. Export another checkpoint.")
    names = manifest.state_names
    specs = {name: manifest.tensors[model_key(source)].spec for name, source in names.items()}
    with Reader(checkpoint, manifest) as reader:
        _write(Path(path), specs, lambda name: reader.read(model_key(names[name])))


@torch.no_grad()
def load_safetensors(module: ShardedModule, path: Path | str, cast: bool = False) -> None:
    """Load the module from safetensors; each rank reads just its own pieces. Not a collective.

    Of tied parameters one name is enough; when the file has several, their values must be equal. Nothing is changed
    when the file does not fit.

    Args:
        module: what `paceline.parallelize` returned.
        path: a safetensors file, a Hugging Face index (`model.safetensors.index.json`), or a directory with either.
        cast: convert tensors of another type instead of refusing them.

    Raises:
        CheckpointError: a file is missing or broken, or names, shapes or types do not fit; lists which.
    """
    path = Path(path)
    folder, weight_map = _weight_map(path)
    shards = saved_shards(module)
    aliases: dict[str, list[str]] = {}
    for name, source in module.state_names.items():
        aliases.setdefault(source, []).append(name)
    with TensorFiles(folder) as files:
        given = _given(files, weight_map, path)
        where = {name: next((a for a in names if a in given), name) for name, names in aliases.items()}
        needed = {where[shard.name]: Spec(shard.tensor.dtype, tuple(shard.shape)) for shard in shards}
        ties = {a for names in aliases.values() for a in names}
        chosen = {name: spec for name, spec in given.items() if name in needed or name not in ties}
        if cast:
            chosen = {n: Spec(needed[n].dtype, spec.shape) if n in needed else spec for n, spec in chosen.items()}
        differ = [
            f"'{where[source]}' and '{name}' differ, but the module ties them."
            for source, names in aliases.items()
            for name in names
            if name in given and name != where[source] and not _equal(files, weight_map, given, where[source], name)
        ]
        advice = "Names must be those of the module's own state_dict(). For other types pass cast=True."
        refuse_if(compare(chosen, needed) + differ, str(path), advice)
        for shard in shards:
            name = where[shard.name]
            whole = Patch.all_of(shard.shape)
            for patch in shard.patches:
                shard.tensor[patch.local.index].copy_(files.read(weight_map[name], name, whole, patch.whole))


def _write(path: Path, specs: Mapping[str, Spec], fetch: Callable[[str], Tensor]) -> None:
    """Write a file that appears whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(draft, specs, fetch, {"format": "pt"})
        os.replace(draft, path)
        settle(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror}. Nothing was left behind.") from error


def _weight_map(path: Path) -> tuple[Path, dict[str, str]]:
    """Return the folder of the files, and the file of each tensor; a single file is told by the name ''."""
    if path.is_dir():
        found = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        if not found:
            raise CheckpointError(f"{path} has neither {_INDEX} nor {_SINGLE}; name the safetensors file itself.")
        path = found[0]
    if path.suffix != ".json":
        return path.parent, {"": path.name}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return path.parent, {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no index of safetensors files: {type(error).__name__}: {error}. It must hold a 'weight_map' "
            "from tensor names to file names."
        ) from error


def _given(files: TensorFiles, weight_map: dict[str, str], path: Path) -> dict[str, Spec]:
    """Return all tensors there are; fills in the map of a single file."""
    if single := weight_map.pop("", None):
        given = files.specs(single)
        weight_map.update(dict.fromkeys(given, single))
        return given
    given = {}
    for file in sorted(set(weight_map.values())):
        given.update({name: spec for name, spec in files.specs(file).items() if weight_map.get(name) == file})
    if lost := sorted(weight_map.keys() - given.keys()):
        raise CheckpointError(f"{path} names '{lost[0]}' in {weight_map[lost[0]]}, which does not hold it.")
    return given


def _equal(files: TensorFiles, weight_map: Mapping[str, str], given: Mapping[str, Spec], a: str, b: str) -> bool:
    """Return whether two tensors of the files hold the same values."""
    if given[a] != given[b]:
        return False
    whole = Patch.all_of(given[a].shape)
    values = [files.read(weight_map[name], name, whole, whole.whole) for name in (a, b)]
    return torch.equal(*values)
