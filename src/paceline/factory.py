"""FACTORY, the way a user names code of their own: `package.module:callable` or `path/to/file.py:callable`.

Knows nothing of what the callable makes; models, samplers and callbacks are all found here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import RecipeError, nearest

_FORMS = "write 'package.module:callable' or 'path/to/file.py:callable'"


def split_factory(factory: str) -> tuple[str, str]:
    """Return the place (a file or a dotted module) and the name in `factory`.

    Raises:
        RecipeError: the text has no colon, or nothing on one of its sides.
    """
    place, colon, name = factory.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise RecipeError(f"cannot read the factory '{factory}'; {_FORMS}.")
    return place, name


def absolute_factory(factory: str, folder: Path | None = None) -> str:
    """Return `factory` with its file, if it names one, made absolute; relative files are looked for in `folder`.

    Args:
        factory: either form of FACTORY.
        folder: where relative files are; the current folder when None.

    Raises:
        RecipeError: the text cannot be read, or there is no such file.
    """
    place, name = split_factory(factory)
    if not place.endswith(".py"):
        return factory
    path = ((folder or Path.cwd()) / Path(place).expanduser()).resolve()
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        there = f"; Python files there: {', '.join(beside)}" if beside else ""
        raise RecipeError(f"factory '{factory}': there is no file {path}{there}.{nearest(path.name, beside)}")
    return f"{path}:{name}"


def load_factory(factory: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import the module of `factory` and return its callable.

    An error inside the user's own file is not ours to hide: it keeps its traceback.

    Raises:
        RecipeError: the file, the module or the name does not exist, or the name is not callable.
    """
    place, name = split_factory(absolute_factory(factory, folder))
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module_by_name(place, factory)
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RecipeError(f"factory '{factory}': {place} defines no '{name}'.{nearest(name, known)}")
    found = getattr(module, name)
    if not callable(found):
        raise RecipeError(f"factory '{factory}': '{name}' is a {type(found).__name__}; it must be callable.")
    call: Callable[..., Any] = found
    return call


def build_model(factory: str, arguments: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Call a model's factory and return `(module, batch)`.

    Raises:
        RecipeError: the factory does not take `arguments`, or returns something else than a module and a batch that
            is a tuple of positional or a dictionary of keyword arguments.
    """
    made = load_factory(factory)(**(arguments or {}))
    if not (isinstance(made, tuple) and len(made) == 2):
        raise RecipeError(
            f"factory '{factory}' returned a {type(made).__name__}; it must return a pair (module, batch), where "
            "module(*batch) or module(**batch) gives a scalar loss or an object with '.loss'."
        )
    module, batch = made
    if not isinstance(batch, tuple | list | dict):
        raise RecipeError(
            f"factory '{factory}' returned a batch of type {type(batch).__name__}; it must be a tuple of positional "
            "or a dictionary of keyword arguments for the module."
        )
    return module, batch if isinstance(batch, dict) else tuple(batch)


def _module_of_file(path: Path) -> ModuleType:
    """Import a file once. Its folder joins `sys.path`, so that it may import its neighbours as a script does."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path} cannot be imported as a Python module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a half-imported module must not be found the next time
        raise
    return module


def _module_by_name(name: str, factory: str) -> ModuleType:
    """Import `name` from the installed packages or the current folder, which a console script does not look in."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise RecipeError(
            f"factory '{factory}': there is no module '{error.name}' among the installed packages or in {here}; "
            "for a file, write 'path/to/file.py:callable'."
        ) from error
