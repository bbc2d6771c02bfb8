"""Peers: what people take for a parameter server in Python today, each as its own documentation shows it."""

from __future__ import annotations

import importlib
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from paceline.bench.server.transports_ways import Client, Load, example, wait_for

_HAS: dict[str, Tensor] = {}


def _rpc_push(*tensors: Tensor) -> None:
    _HAS["pushed"] = tensors[0] if tensors else torch.empty(0)


def _rpc_dense() -> Tensor:
    return _HAS["dense"]


def _rpc_rows(keys: Tensor) -> Tensor:
    return _HAS["values"][: len(keys)]


def _rpc() -> Any:
    return importlib.import_module("torch.distributed.rpc")


class TorchRpc:
    """`torch.distributed.rpc` on TensorPipe, which takes shared memory on one host by itself."""

    def __init__(self, name: str) -> None:
        del name

    def serve(self, folder: Path, load: Load) -> None:
        """Be the server until the client is gone."""
        rpc = _rpc()
        _HAS.update(example(load))
        rpc.init_rpc("server", rank=0, world_size=2, rpc_backend_options=self._options(folder))
        rpc.shutdown()

    def connect(self, folder: Path, load: Load) -> Client:
        """Be the client."""
        rpc = _rpc()
        has = example(load)
        rpc.init_rpc("client", rank=1, world_size=2, rpc_backend_options=self._options(folder))
        return Client(
            push=lambda: rpc.rpc_sync("server", _rpc_push, (has["dense"],)),
            pull=lambda: rpc.rpc_sync("server", _rpc_dense),
            push_rows=lambda: rpc.rpc_sync("server", _rpc_push, (has["keys"], has["values"])),
            pull_rows=lambda: rpc.rpc_sync("server", _rpc_rows, (has["keys"],)),
            rtt=lambda: rpc.rpc_sync("server", _rpc_push),
            close=rpc.shutdown,
        )

    @staticmethod
    def _options(folder: Path) -> Any:
        return _rpc().TensorPipeRpcBackendOptions(init_method=f"file://{folder / 'meet'}")


class Gloo:
    """`send` and `recv` of `torch.distributed`, each end knowing what comes: a header says which, and one returns."""

    def __init__(self, name: str) -> None:
        del name

    def serve(self, folder: Path, load: Load) -> None:
        """Be the server until the client is gone."""
        import torch.distributed as dist

        self._meet(folder, 0)
        has = example(load)
        asked = torch.zeros(8, dtype=torch.int64)
        takes = {1: [has["dense"].clone()], 3: [has["keys"].clone(), has["values"].clone()], 4: [has["keys"].clone()]}
        gives = {2: has["dense"], 4: has["values"]}
        while True:
            dist.recv(asked, 1)
            kind = int(asked[0])
            if not kind:
                return
            for tensor in takes.get(kind, ()):
                dist.recv(tensor, 1)
            dist.send(gives.get(kind, asked), 1)

    def connect(self, folder: Path, load: Load) -> Client:
        """Be the client."""
        import torch.distributed as dist

        self._meet(folder, 1)
        has = example(load)
        heads = [torch.full((8,), kind) for kind in range(6)]
        done, dense, values = heads[0].clone(), torch.empty_like(has["dense"]), torch.empty_like(has["values"])

        def ask(kind: int, tensors: list[Tensor], into: Tensor) -> Tensor:
            dist.send(heads[kind], 0)
            for tensor in tensors:
                dist.send(tensor, 0)
            dist.recv(into, 0)
            return into

        return Client(
            push=lambda: ask(1, [has["dense"]], done),
            pull=lambda: ask(2, [], dense),
            push_rows=lambda: ask(3, [has["keys"], has["values"]], done),
            pull_rows=lambda: ask(4, [has["keys"]], values),
            rtt=lambda: ask(5, [], done),
            close=lambda: dist.send(heads[0], 0),
        )

    @staticmethod
    def _meet(folder: Path, rank: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)


_UNLIMITED: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Grpc:
    """gRPC with bytes as messages, over TCP: tensors are copied into bytes, and read out of them where they lie."""

    def __init__(self, name: str) -> None:
        del name

    def serve(self, folder: Path, load: Load) -> None:
        """Be the server until the client is gone."""
        grpc: Any = importlib.import_module("grpc")
        has, gone = example(load), threading.Event()

        def end(request: bytes, context: object) -> bytes:
            gone.set()
            return b""

        calls = {
            "push": lambda request, context: (_tensor(request, torch.float32), b"")[1],
            "pull": lambda request, context: has["dense"].numpy().tobytes(),
            "rows": lambda request, context: (_tensor(request, torch.int64), has["values"].numpy().tobytes())[1],
            "end": end,
        }
        server = grpc.server(ThreadPoolExecutor(1), options=_UNLIMITED)
        handlers = {name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("server", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        (folder / "draft").write_text(str(port), encoding="utf-8")
        (folder / "draft").rename(folder / "address")
        gone.wait()
        server.stop(1).wait()

    def connect(self, folder: Path, load: Load) -> Client:
        """Be the client."""
        grpc: Any = importlib.import_module("grpc")
        has = example(load)
        port = wait_for(folder / "address").read_text(encoding="utf-8")
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_UNLIMITED)
        push, pull, rows, end = (channel.unary_unary(f"/server/{name}") for name in ("push", "pull", "rows", "end"))
        shape = has["values"].shape
        return Client(
            push=lambda: push(has["dense"].numpy().tobytes()),
            pull=lambda: _tensor(pull(b""), torch.float32),
            push_rows=lambda: push(has["keys"].numpy().tobytes() + has["values"].numpy().tobytes()),
            pull_rows=lambda: _tensor(rows(has["keys"].numpy().tobytes()), torch.float32).view(shape),
            rtt=lambda: push(b""),
            close=lambda: (end(b""), channel.close()),
        )


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that bytes cannot be written to
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


class Ray:
    """A Ray actor; arrays go through its object store in shared memory."""

    def __init__(self, name: str) -> None:
        del name

    def serve(self, folder: Path, load: Load) -> None:
        """Ray starts its own."""

    def connect(self, folder: Path, load: Load) -> Client:
        """Be the client, and start Ray."""
        ray: Any = importlib.import_module("ray")
        memory = max(200_000_000, 8 * load.size)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=memory)
        has = {name: tensor.numpy() for name, tensor in example(load).items()}

        class Server:
            def push(self, *arrays: Any) -> None:
                self.pushed = arrays

            def dense(self) -> Any:
                return has["dense"]

            def rows(self, keys: Any) -> Any:
                return has["values"][: len(keys)]

        actor = ray.remote(Server).remote()
        return Client(
            push=lambda: ray.get(actor.push.remote(has["dense"])),
            pull=lambda: torch.as_tensor(ray.get(actor.dense.remote())),
            push_rows=lambda: ray.get(actor.push.remote(has["keys"], has["values"])),
            pull_rows=lambda: torch.as_tensor(ray.get(actor.rows.remote(has["keys"]))),
            rtt=lambda: ray.get(actor.push.remote()),
            close=ray.shutdown,
        )
