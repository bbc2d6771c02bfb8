"""Where the code of loaded modules comes from, and whether it is still what is on disk.

A program depends on the source it was captured from. What is installed is known by its version; everything else that is
loaded and is not part of Python or of Paceline is the user's own and is known by the content of its files.
"""

from __future__ import annotations

import hashlib
import os
import site
import sys
import sysconfig
import time
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from paceline.errors import FingerprintError

_OURS = Path(__file__).parent.parent
_FIXED_PACKAGES = ("torch", "numpy")


class Origin(Enum):
    """Who wrote a module."""

    FIXED = "fixed"
    """Python, PyTorch, NumPy and Paceline: known by version, or by the content of all of their files."""
    INSTALLED = "installed"
    USER = "user"


class LoadedModules:
    """The modules loaded at one moment, by who wrote them."""

    def __init__(self) -> None:
        self.modules = {name: m for name, m in list(sys.modules.items()) if isinstance(m, ModuleType)}
        self._origins: dict[str, Origin] = {}

    def origin(self, name: str) -> Origin:
        """Return who wrote the module called `name`; code that belongs to no loaded module is the user's."""
        if name not in self._origins:
            self._origins[name] = self._find_origin(name)
        return self._origins[name]

    def _find_origin(self, name: str) -> Origin:
        path = file_of(self.modules[name]) if name in self.modules else None
        if path is None:
            is_known = name != "__main__" and name.partition(".")[0] in (*sys.stdlib_module_names, *_FIXED_PACKAGES)
            return Origin.FIXED if is_known else Origin.USER
        if path.startswith(str(_OURS) + os.sep):
            return Origin.FIXED
        if path.startswith(self._installed_roots):
            return Origin.FIXED if name.partition(".")[0] in _FIXED_PACKAGES else Origin.INSTALLED
        return Origin.FIXED if path.startswith(self._python_roots) else Origin.USER

    @cached_property
    def _installed_roots(self) -> tuple[str, ...]:
        paths = sysconfig.get_paths()
        return _prefixes([paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()])

    @cached_property
    def _python_roots(self) -> tuple[str, ...]:
        paths = sysconfig.get_paths()
        return _prefixes([paths["stdlib"], paths["platstdlib"]])

    @cached_property
    def user_modules(self) -> dict[str, ModuleType]:
        """Loaded modules of the user that have a file, by name, in alphabetical order.

        Raises:
            FingerprintError: the main program is interactive, so that its source is nowhere.
        """
        main = self.modules.get("__main__")
        if main is not None and file_of(main) is None:
            raise FingerprintError(
                "the main program is interactive or given on the command line: its source is no file"
            )
        with_file = sorted(name for name, module in self.modules.items() if file_of(module) is not None)
        return {name: self.modules[name] for name in with_file if self.origin(name) is Origin.USER}

    def of_packages(self, packages: Collection[str]) -> Iterator[ModuleType]:
        """Yield the loaded modules that have a file and belong to one of these top-level packages."""
        for name, module in self.modules.items():
            if name.partition(".")[0] in packages and file_of(module) is not None:
                yield module


def source_hashes(packages: Collection[str] = ()) -> dict[str, str]:
    """Return the SHA-256 of every loaded file of the user, and of `packages`, by path.

    Called after a capture, it also knows what the forward pass itself imported.

    Raises:
        FingerprintError: a file cannot be read, or was changed after it was loaded.
    """
    loaded = LoadedModules()
    modules = {str(file_of(module)): module for module in loaded.of_packages(packages)}
    modules |= {str(file_of(module)): module for module in loaded.user_modules.values()}
    return {path: content_hash(module) for path, module in sorted(modules.items())}


def still_current(hashes: Mapping[str, str]) -> str | None:
    """Return the first file whose content is not what it was, or None when all are."""
    for path, expected in hashes.items():
        try:
            content = Path(path).read_bytes()
        except OSError:
            return path
        if hashlib.sha256(content).hexdigest() != expected:
            return path
    return None


def content_hash(module: ModuleType) -> str:
    """Return the SHA-256 of a module's file.

    Raises:
        FingerprintError: the file cannot be read, or is not what the running process has loaded.
    """
    path = file_of(module)
    assert path is not None
    try:
        content = Path(path).read_bytes()
        status = os.stat(path)
    except OSError as error:
        raise FingerprintError(f"the source of module '{module.__name__}' cannot be read: {error}") from error
    edited = max(status.st_mtime, status.st_ctime)  # the latter also tells of files moved into place
    if edited >= _process_start() - 1.0 and path.endswith(".py") and not _is_loaded_from(module, path, content):
        raise FingerprintError(f"{path} was changed after it was loaded")
    return hashlib.sha256(content).hexdigest()


def own_sources_hash() -> str:
    """Return the SHA-256 of all source files of Paceline."""
    digest = hashlib.sha256()
    for path in sorted(_OURS.rglob("*.py")):
        name = ".".join(("paceline", *path.relative_to(_OURS).with_suffix("").parts)).removesuffix(".__init__")
        module = sys.modules.get(name)
        content = content_hash(module) if module is not None else hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def installed_distributions() -> dict[str, list[str]]:
    """Return what is installed: for every distribution the SHA-256 of its list of files, which holds their hashes."""
    found = {}
    for folder in sorted({entry for entry in sys.path if entry and os.path.isdir(entry)}):
        for info in os.listdir(folder):
            if info.endswith((".dist-info", ".egg-info")):
                files = [Path(folder, info, name) for name in ("RECORD", "PKG-INFO")]
                found[info] = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()]
    return dict(sorted(found.items()))


def file_of(module: ModuleType) -> str | None:
    """Return the path of a module's file, None where there is none (built in, namespace package, interactive)."""
    path = vars(module).get("__file__")
    return os.path.abspath(path) if isinstance(path, str) else None


def _prefixes(paths: Collection[str]) -> tuple[str, ...]:
    both = {*map(os.path.abspath, paths), *map(os.path.realpath, paths)}
    return tuple(path + os.sep for path in sorted(both))


def _process_start() -> float:
    """Return when this process began, in seconds since the epoch; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def _is_loaded_from(module: ModuleType, path: str, content: bytes) -> bool:
    """Return whether the functions and methods in memory are those of this source."""
    try:
        known = set(_all_codes(compile(content, path, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        return False
    holders = [module, *(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__)]
    functions = [
        value for holder in holders for value in list(vars(holder).values()) if isinstance(value, FunctionType)
    ]
    codes = [f.__code__ for f in functions if os.path.abspath(f.__code__.co_filename) == path]
    return all(code in known for code in codes)


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_codes(constant)
