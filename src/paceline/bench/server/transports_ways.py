"""Who takes part: our transports, their raw limits, and peers. Each is two processes, a server and its client.

Each is imported in processes of its own only: nobody has another's threads.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from torch import Tensor

Times: TypeAlias = Mapping[str, Sequence[float]]
"""Seconds of each round, by what was done: push, pull, pull_placed, push_rows, pull_rows, rtt."""


@dataclass(frozen=True)
class Load:
    """What is moved. size: bytes of the dense tensor, a multiple of 64; rows: of `width` elements."""

    size: int
    rows: int
    width: int


@dataclass(frozen=True)
class Client:
    """What a client can do; each returns when it is done, and the pulls what came.

    Attributes:
        push: send the dense tensor.
        pull: get the dense tensor, to be read wherever it lies.
        push_rows: send keys and values.
        pull_rows: send keys, get values.
        rtt: send nothing and hear of it.
        pull_placed: get the dense tensor into memory of the caller, where that is another thing than `pull`.
        close: end.
    """

    push: Callable[[], object]
    pull: Callable[[], Tensor]
    push_rows: Callable[[], object] | None = None
    pull_rows: Callable[[], Tensor] | None = None
    rtt: Callable[[], object] | None = None
    pull_placed: Callable[[], Tensor] | None = None
    close: Callable[[], object] = lambda: None


class Way(Protocol):
    """One of those who take part."""

    def serve(self, folder: Path, load: Load) -> None:
        """Be the server until the client is gone."""
        ...

    def connect(self, folder: Path, load: Load) -> Client:
        """Be the client."""
        ...


_OURS, _RAW, _PEERS = (f"paceline.bench.server.transports_{part}" for part in ("ours", "raw", "peers"))
OURS: Final = ("shared", "unix", "tcp", "tcp-4")
LIMITS: Final = {"shared": "memcpy", "unix": "raw-unix", "tcp": "raw-tcp", "tcp-4": "raw-tcp"}
PEERS: Final = ("torch-rpc", "gloo", "grpc", "ray", "ps-lite")
WAYS: Final = {
    **{name: (_OURS, "Ours") for name in OURS},
    "memcpy": (_RAW, "Memcpy"),
    **{name: (_RAW, "Sockets") for name in ("raw-unix", "raw-tcp")},
    "torch-rpc": (_PEERS, "TorchRpc"),
    "gloo": (_PEERS, "Gloo"),
    "grpc": (_PEERS, "Grpc"),
    "ray": (_PEERS, "Ray"),
    "ps-lite": ("paceline.bench.server.transports_pslite", "PsLite"),
}
"""By name: a module and the class in it that is made with the name."""


def way(name: str) -> Way:
    """Return one of them."""
    module, of = WAYS[name]
    made: Way = getattr(importlib.import_module(module), of)(name)
    return made


def wait_for(path: Path, patience_s: float = 60) -> Path:
    """Wait until a file is there."""
    until = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"the server did not come up within {patience_s:g} s")
        time.sleep(0.01)
    return path


def example(load: Load) -> dict[str, Any]:
    """Return the tensors that are moved: `dense` [size/4], `keys` [rows], `values` [rows, width]."""
    import torch

    torch.set_num_threads(1)
    dense = torch.arange(load.size // 4, dtype=torch.float32)
    values = torch.arange(load.rows * load.width, dtype=torch.float32).view(load.rows, load.width)
    return {"dense": dense, "keys": torch.arange(load.rows), "values": values}
