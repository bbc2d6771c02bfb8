"""Files and optional packages: opened here, so that what is missing is said in one way everywhere."""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import DataError, nearest


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses about `path` into a DataError."""
    try:
        yield
    except FileNotFoundError as error:
        beside = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
        where = "" if path.parent.is_dir() else f" Its folder {path.parent} does not exist either."
        raise DataError(f"there is no file {path}.{where}{nearest(path.name, beside)}") from error
    except PermissionError as error:
        raise DataError(f"no permission to read {path}; this process runs as user {os.geteuid()}.") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; name the files in it, such as '{path}/*'.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        DataError: there is no such file, it is a folder, or it cannot be read.
    """
    with reading(path):
        return path.read_bytes()


def find_files(patterns: Iterable[str], base_dir: Path) -> list[Path]:
    """Return the files that paths and globs (`*`, `?`, `**`) name, each once: in the order given, sorted within a glob.

    Raises:
        DataError: a glob matches no file. A plain path that does not exist is found out when it is read.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        full = base_dir / Path(pattern).expanduser()
        if not glob.has_magic(str(full)) or full.exists():
            found[full] = None
            continue
        matches = sorted(path for text in glob.iglob(str(full), recursive=True) if (path := Path(text)).is_file())
        if not matches:
            raise DataError(
                f"no file matches '{full}'; check the folder and the pattern, or name the files one by one."
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def optional(module: str, extra: str, purpose: str) -> Any:
    """Import a module that belongs to an extra of this project.

    Raises:
        DataError: it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs the package '{module.partition('.')[0]}', which cannot be imported ({error}); "
            f"run: pip install 'paceline[{extra}]'"
        ) from error
