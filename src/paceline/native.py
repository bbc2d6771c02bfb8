"""Native parts, built from their sources at first use with torch's own extension tools, and kept.

Without a compiler there are none, and their rooms go on in Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["BuildError", "Extension"]

_FLAGS = ("-O3", "-march=native", "-fwrapv", "-fvisibility=hidden", "-std=c++20")
_TIMEOUT_S = 900
_LAST_LINES = 15
_LOADING = threading.Lock()
"""A module that one thread loads is half there for another."""


class BuildError(Exception):
    """The native part cannot be built here; the message says why."""


@dataclass(frozen=True)
class Extension:
    """A native part.

    Attributes:
        name: of the module.
        sources: where they lie, with their headers.
        units: patterns of the files to compile, in `sources`.
        what: is built, for people.
        takes: how long, for people.
        flags: for the compiler, besides those of all.
    """

    name: str
    sources: Path
    units: tuple[str, ...]
    what: str
    takes: str
    flags: tuple[str, ...] = ()

    def load(self) -> ModuleType:
        """Return the module; the first process on a machine builds it, others wait for that.

        Raises:
            BuildError: there is no compiler, or it failed.
        """
        with _LOADING:
            return _loaded(self)

    @property
    def all_flags(self) -> tuple[str, ...]:
        """Flags for the compiler."""
        return (*_FLAGS, *self.flags)

    @property
    def files(self) -> list[str]:
        """The files to compile."""
        return [str(path) for pattern in self.units for path in sorted(self.sources.glob(pattern))]

    @property
    def directory(self) -> Path:
        """Where this machine keeps what these sources, this torch and this processor give together."""
        parts = [torch.__version__, sys.version, sysconfig.get_platform(), *self.all_flags, _processor()]
        digest = hashlib.sha256("\n".join(parts).encode())
        for path in sorted(path for path in self.sources.rglob("*") if path.suffix in (".cpp", ".hpp")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "paceline" / "native" / digest.hexdigest()[:16]


@cache
def _loaded(extension: Extension) -> ModuleType:
    directory = extension.directory
    library = directory / f"{extension.name}.so"
    if not library.exists():
        with _locked(directory) as lock:
            if not library.exists():
                _build(extension, directory, lock)
    return _import(extension.name, library)


def _processor() -> str:
    """Return what tells processors apart: a home directory may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    # Asked for only where it is needed: it starts a process.
    return next((line for line in lines if line.startswith(("flags", "Features"))), "") or platform.processor()


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Be the only one that builds there; yields the lock, which holds as long as a process has it open."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(directory / "building", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        raise BuildError(f"cannot write to {directory} ({error.strerror}); set XDG_CACHE_HOME elsewhere") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def _build(extension: Extension, directory: Path, lock: int) -> None:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise BuildError("there is no C++ compiler (Debian, Ubuntu: apt install g++)")
    sys.stderr.write(f"paceline: building {extension.what}, once on this machine ({extension.takes})\n")
    start = time.monotonic()
    # Apart from this process: torch's tools read the PATH, print, and lock by files that a killed build leaves behind.
    directory.joinpath("lock").unlink(missing_ok=True)
    # With -P, as a module of the standard library is not to be looked for beside this file.
    told = json.dumps([extension.name, str(directory), extension.files, extension.all_flags])
    command = [sys.executable, "-P", __file__, told]
    try:
        done = subprocess.run(
            command,
            env=_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            pass_fds=(lock,),  # should we be killed, others wait for what goes on building
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the compiler took longer than {_TIMEOUT_S} s") from error
    output = done.stdout + done.stderr
    directory.joinpath("build.log").write_text(output)
    if done.returncode != 0:
        lines = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines()
        first = "\n  ".join(lines[:_LAST_LINES])
        raise BuildError(f"the compiler failed:\n  {first}\n(all of it: {directory}/build.log)")
    directory.joinpath(f"{extension.name}.built.so").rename(directory / f"{extension.name}.so")
    sys.stderr.write(f"paceline: built in {time.monotonic() - start:.0f} s\n")


def _environment() -> dict[str, str]:
    """Return the environment of a build: with the `ninja` of this Python's own packages within reach."""
    scripts = sysconfig.get_path("scripts")
    return {**os.environ, "PATH": os.pathsep.join((os.environ.get("PATH", os.defpath), scripts))}


def _compile(name: str, directory: str, files: list[str], flags: list[str]) -> None:
    from torch.utils.cpp_extension import load

    load(name, files, extra_cflags=flags, build_directory=directory, is_python_module=False)
    # Only what is complete gets the name under which others look for it.
    Path(directory, f"{name}.so").rename(Path(directory, f"{name}.built.so"))


def _import(name: str, library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"cannot load {library} ({error}); remove its directory to build it anew") from error
    return module


if __name__ == "__main__":
    _compile(*json.loads(sys.argv[1]))
