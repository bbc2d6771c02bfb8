"""ps-lite, from a checkout of https://github.com/dmlc/ps-lite that `PS_LITE` names.

It is not on PyPI, and needs ZeroMQ and Protocol Buffers: Debian's `libzmq3-dev libprotobuf-dev protobuf-compiler`.
`PS_LITE=CHECKOUT python -m paceline.bench.server.transports_pslite` builds it, within the checkout.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from paceline.bench.server.transports_ways import Client, Load, example, wait_for

CHECKOUT: Final = "PS_LITE"
"""The environment variable that names the checkout."""

_PEER: Final = Path(__file__).parent / "native" / "pslite.cpp"
_SOURCES: Final = ("customer.cc", "postoffice.cc", "van.cc")
_DENSE, _ROWS = 0, 1  # commands of pslite.cpp


class PsLite:
    """A scheduler, a server and a worker of ps-lite over TCP, as its documentation starts them."""

    def __init__(self, name: str) -> None:
        del name

    def serve(self, folder: Path, load: Load) -> None:
        """Be the server until the client is gone; its scheduler is a child."""
        library = _library(_checkout())
        with socket.socket() as free:  # ps-lite wants a number; nobody else takes one in the moment between
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        schedule = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).paceline_schedule()"
        surroundings = os.environ | _surroundings("scheduler", port)
        scheduler = subprocess.Popen([sys.executable, "-c", schedule, os.fspath(library)], env=surroundings)
        (folder / "draft").write_text(f"{library}\n{port}", encoding="utf-8")
        (folder / "draft").rename(folder / "address")
        has = example(load)
        _loaded(library, "server", port).paceline_serve(*_memory(has["dense"]), *_memory(has["values"]))
        scheduler.wait()

    def connect(self, folder: Path, load: Load) -> Client:
        """Be the worker."""
        _library(_checkout())  # says what is missing
        library, port = wait_for(folder / "address").read_text(encoding="utf-8").splitlines()
        peer = _loaded(Path(library), "worker", int(port))
        peer.paceline_connect()
        has = example(load)
        one, nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        dense, values = torch.zeros_like(has["dense"]), torch.zeros_like(has["values"])

        def push(command: int, keys: Tensor, tensor: Tensor) -> Callable[[], object]:
            return lambda: peer.paceline_push(command, *_memory(keys), *_memory(tensor))

        def pull(command: int, keys: Tensor, into: Tensor) -> Callable[[], Tensor]:
            return lambda: (peer.paceline_pull(command, *_memory(keys), *_memory(into)), into)[1]

        return Client(
            push=push(_DENSE, one, has["dense"]),
            pull=pull(_DENSE, one, dense),
            push_rows=push(_ROWS, has["keys"], has["values"]),
            pull_rows=pull(_ROWS, has["keys"], values),
            rtt=push(_ROWS, one, nothing),
            close=peer.paceline_close,
        )


def _checkout() -> Path:
    """Return the checkout.

    Raises:
        RuntimeError: there is none.
    """
    given = os.environ.get(CHECKOUT)
    if not given:
        raise RuntimeError(f"not built: let {CHECKOUT} name a checkout of github.com/dmlc/ps-lite")
    checkout = Path(given).absolute()
    if not (checkout / "include" / "ps" / "ps.h").is_file():
        raise RuntimeError(f"{CHECKOUT}={given} is no checkout of github.com/dmlc/ps-lite")
    return checkout


def _library(checkout: Path) -> Path:
    """Return the library.

    Raises:
        RuntimeError: it was not built.
    """
    library = checkout / "build" / "paceline" / "peer.so"
    if not library.is_file():
        raise RuntimeError(f"not built: run {CHECKOUT}={checkout} python -m paceline.bench.server.transports_pslite")
    return library


def build(checkout: Path) -> Path:
    """Build ps-lite and our peer as one library within the checkout; return where it is.

    Raises:
        RuntimeError: a tool is missing, or refuses.
    """
    folder, sources = checkout / "build" / "paceline", checkout / "src"
    folder.mkdir(parents=True, exist_ok=True)
    _tool("protoc", f"--cpp_out={folder}", f"--proto_path={sources}", str(sources / "meta.proto"))
    files = [str(sources / name) for name in _SOURCES] + [str(folder / "meta.pb.cc"), str(_PEER)]
    include = [f"-I{path}" for path in (folder, sources, checkout / "include")]
    options = ["-std=c++11", "-O3", "-msse2", "-fPIC", "-shared", "-pthread", "-w"]
    draft = folder / f"peer-{os.getpid()}.so"
    _tool("g++", *options, *include, *files, "-o", str(draft), "-lprotobuf-lite", "-lzmq")
    return draft.rename(folder / "peer.so")


def _tool(name: str, *arguments: str) -> None:
    if shutil.which(name) is None:
        raise RuntimeError(f"{name} is not installed")
    done = subprocess.run([name, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {(done.stderr.strip() or 'without a word').splitlines()[-1]}")


def _loaded(library: Path, role: str, port: int) -> ctypes.CDLL:
    os.environ |= _surroundings(role, port)
    return ctypes.CDLL(os.fspath(library))


def _surroundings(role: str, port: int) -> dict[str, str]:
    """Return what ps-lite reads of its environment: who this process is and where the scheduler is."""
    return {
        "DMLC_ROLE": role,
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
    }


def _memory(tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())


if __name__ == "__main__":
    try:
        print(f"built {build(_checkout())}")
    except RuntimeError as error:
        sys.exit(f"error: {error}")
