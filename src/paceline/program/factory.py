"""Factories: finds the user's own code from one line of text.

`package.module:callable` or `path/to/file.py:callable`. Knows nothing of what the callable makes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import RecipeError, nearest

_FORMS = "write 'package.module:callable' or 'path/to/file.py:callable'"


def load_factory(text: str, base_dir: Path) -> Callable[..., Any]:
    """Return the callable that `text` names.

    A file is imported once per process, and its folder joins the front of `sys.path`, as for a script, so that it can
    import its neighbours. A dotted module is looked for in `base_dir` too.

    Args:
        text: `package.module:callable` or `path/to/file.py:callable`; the callable may be dotted (`Class.method`).
        base_dir: folder that relative files are relative to.

    Raises:
        RecipeError: the text has another form; the file, module or name does not exist (the nearest is named); the
            name is not callable; or importing the user's code failed (the user's line is shown).
    """
    place, colon, name = text.rpartition(":")
    if not (colon and place.strip() and name.strip()):
        raise RecipeError(f"cannot read the factory '{text}'; {_FORMS}.")
    place, name = place.strip(), name.strip()
    is_file = place.endswith(".py") or "/" in place
    module = _import_file(text, base_dir / Path(place).expanduser()) if is_file else _import_name(text, place, base_dir)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [key for key in dir(found) if not key.startswith("_") and callable(getattr(found, key, None))]
            raise RecipeError(f"factory '{text}': {place} has no '{part}'.{nearest(part, names)}{_listed(names)}")
        found = getattr(found, part)
    if not callable(found):
        raise RecipeError(f"factory '{text}': '{name}' is a {type(found).__name__}; it must be callable.")
    factory: Callable[..., Any] = found
    return factory


def user_line(error: BaseException) -> str:
    """Return `file.py:12: the line's text` of the user's innermost line on the way to `error`.

    Lines of Python, of installed packages and of this one are passed over, unless there are no others.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "(no line known)"
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    foreign = ("<", str(Path(__file__).parents[1]), *libraries)
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(foreign)), frames[-1])
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def _import_file(text: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise RecipeError(f"factory '{text}': there is no file {path}.{nearest(path.name, beside)}{_listed(beside)}")
    # The stem alone could hide an installed module; the path's checksum keeps two files of one name apart.
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    _search(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"factory '{text}': {path} is not a Python source file; {_FORMS}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # anything at all may go wrong in a user's file
        del sys.modules[name]
        raise RecipeError(_import_failure(text, error)) from error
    return module


def _import_name(text: str, name: str, base_dir: Path) -> ModuleType:
    _search(base_dir.resolve())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # anything at all may go wrong in a user's module
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            raise RecipeError(
                f"factory '{text}': there is no module '{missing}', neither installed nor in {base_dir.resolve()}."
                f"{nearest(missing, _modules_beside(missing, base_dir))} For a file, write 'path/to/file.py:callable'."
            ) from error
        raise RecipeError(_import_failure(text, error)) from error


def _modules_beside(missing: str, base_dir: Path) -> list[str]:
    """Return what could have been meant by `missing`: modules of its parent package, or of `base_dir`."""
    package, _, _ = missing.rpartition(".")
    folders = list(sys.modules[package].__path__) if package in sys.modules else [str(base_dir)]
    prefix = f"{package}." if package else ""
    return [prefix + entry.stem for folder in folders for entry in Path(folder).glob("*.py")]


def _import_failure(text: str, error: BaseException) -> str:
    problem = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    return f"factory '{text}' could not be imported: {problem}\n  {user_line(error)}"


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _listed(names: list[str]) -> str:
    return f" There is: {', '.join(names[:10])}." if names else ""
