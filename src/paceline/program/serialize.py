"""Graphs as plain JSON values and back, exactly, without pickle: a file can name operators, never code.

A graph is a table of nodes. Operators are resolved by name in a few namespaces only, plain functions in a registry that
the caller gives; anything else is refused in both directions. Tensors lifted by tracing (`get_attr` nodes) are not part
of the JSON: they travel beside it by name. This module knows nothing of files, keys or programs' roles.

Layout of the JSON value, made to be quick to read (rows refer to nodes, targets and tensors by position):

    {"format": 1,
     "targets": ["aten.mm.default", "operator.getitem", "function:NAME", ...],
     "tensors": [[shape, stride, dtype, device], ...],
     "nodes": [[op, name, target, args, kwargs, val, meta], ...]}

Values: None, bool, int, str, finite floats and lists are themselves; everything else is an object of one tag, such as
{"n": 3} for the fourth node or {"t": [...]} for a tuple.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from paceline.errors import SerializationError
from paceline.program.garbage import collection_held
from paceline.program.tensor_meta import TensorMeta

Json = Any
FORMAT = 1
NAMESPACES = ("aten", "paceline", "_c10d_functional")
_OPERATOR = re.compile(rf"({'|'.join(NAMESPACES)})\.([A-Za-z]\w*|_\w+)\.(\w+)")
_GETITEM = "operator.getitem"
_FUNCTION = "function:"
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory": torch.memory_format}
_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Codec:
    """How values of one class are written: `encode` returns a value that can itself be written, `decode` undoes it."""

    type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def graph_to_json(
    graph: Graph,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    *,
    codecs: Mapping[str, Codec] | None = None,
    meta_keys: Collection[str] = (),
) -> dict[str, Json]:
    """Return `graph` as JSON values.

    Args:
        graph: calls of ATen, `torch.ops.paceline` and functional collectives, `operator.getitem` and `functions`.
        functions: plain Python functions that nodes may call, by the name they have on disk.
        codecs: classes whose values may stand in arguments and meta, by the tag they have on disk.
        meta_keys: the entries of `node.meta` to keep beside `val`.

    Raises:
        SerializationError: the graph holds an operator or a value that cannot be written; the message names the node.
    """
    return _Writer(functions or {}, codecs or {}, meta_keys).graph(graph)


def graph_from_json(
    data: Mapping[str, Json],
    functions: Mapping[str, Callable[..., Any]] | None = None,
    constants: Mapping[str, Tensor] | None = None,
    *,
    codecs: Mapping[str, Codec] | None = None,
    values: Callable[[TensorMeta], Any] | None = None,
) -> Graph:
    """Return the graph that `graph_to_json` wrote. `GraphModule(constants, graph)` makes it callable; it takes its
    placeholders in order, whatever nesting of arguments the written graph was called with.

    Args:
        data: what `graph_to_json` returned, possibly after a round trip through JSON text.
        functions: as given to `graph_to_json`.
        constants: the tensors that `get_attr` nodes name; checked against what the graph expects.
        codecs: as given to `graph_to_json`.
        values: makes the tensors in `meta["val"]`; by default they stay `TensorMeta`. See `tensor_meta.fake_tensors`.

    Raises:
        SerializationError: the data is malformed, of another format, or names something that is not allowed here.
    """
    try:
        with collection_held():
            return _Reader(functions or {}, constants or {}, codecs or {}, values).graph(data)
    except _MALFORMED as error:  # whatever is wrong with a file, the caller has one thing to do: capture again
        raise SerializationError(
            f"a stored graph is malformed ({type(error).__name__}: {error}); delete the file it came from."
        ) from error


def _refuse(what: str) -> SerializationError:
    return SerializationError(
        f"cannot write {what}; a stored graph holds calls of torch.ops.({'|'.join(NAMESPACES)}), operator.getitem and "
        "registered functions on nodes, numbers, strings, lists and registered classes. Run without the program cache."
    )


class _Writer:
    """Encodes one graph; positions of nodes, targets and tensors are shared by all of its rows."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], codecs: Mapping[str, Codec], meta_keys: Collection[str]
    ) -> None:
        self.function_names = {function: name for name, function in functions.items()}
        self.codecs = {codec.type: (tag, codec) for tag, codec in codecs.items()}
        self.meta_keys = sorted(meta_keys)
        self.position: dict[Node, int] = {}
        self.targets: dict[str, int] = {}
        self.target_of: dict[Any, int] = {}
        self.tensors: dict[tuple[Any, ...], int] = {}

    def graph(self, graph: Graph) -> dict[str, Json]:
        rows = []
        for node in graph.nodes:
            try:
                rows.append(self._row(node))
            except SerializationError as error:
                raise SerializationError(f"node '{node.name}' ({node.target}): {error}") from None
            self.position[node] = len(self.position)
        tensors = [[list(shape), list(stride), dtype, device] for shape, stride, dtype, device in self.tensors]
        return {"format": FORMAT, "targets": list(self.targets), "tensors": tensors, "nodes": rows}

    def _row(self, node: Node) -> list[Json]:
        meta = {key: self.value(node.meta[key]) for key in self.meta_keys if key in node.meta}
        return [
            node.op,
            node.name,
            self._target(node),
            [self.value(a) for a in node.args],
            {key: self.value(a) for key, a in node.kwargs.items()},
            self._val(node.meta["val"]) if "val" in node.meta else [],
            meta,
        ]

    def _target(self, node: Node) -> Json:
        match node.op:
            case "placeholder" | "get_attr" | "output":
                return str(node.target)
            case "call_function":
                if node.target not in self.target_of:
                    name = self._function_name(node.target)
                    self.target_of[node.target] = self.targets.setdefault(name, len(self.targets))
                return self.target_of[node.target]
        raise _refuse(f"a node of kind '{node.op}'")

    def _function_name(self, target: Any) -> str:
        if isinstance(target, OpOverload) and _OPERATOR.fullmatch(str(target)):
            return str(target)
        if target is operator.getitem:
            return _GETITEM
        if target in self.function_names:
            return _FUNCTION + self.function_names[target]
        raise _refuse(f"a call of '{target}'")

    def value(self, value: Any) -> Json:
        kind = type(value)
        if value is None or kind is bool or kind is int or kind is str:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"f": str(value)}
        if kind is Node:
            if value not in self.position:
                raise _refuse(f"the node '{value.name}', which this graph does not define before it is used")
            return {"n": self.position[value]}
        if kind in self.codecs:
            tag, codec = self.codecs[kind]
            return {"x": [tag, self.value(codec.encode(value))]}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, list):
            return [self.value(v) for v in value]
        if kind is tuple:
            return {"t": [self.value(v) for v in value]}
        if isinstance(value, dict):
            return {"d": [[self.value(k), self.value(v)] for k, v in value.items()]}
        if kind is slice:
            return {"s": [self.value(v) for v in (value.start, value.stop, value.step)]}
        if kind is complex:
            return {"c": [self.value(value.real), self.value(value.imag)]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        for tag, named in _NAMED.items():
            if kind is named:
                return {tag: str(value).removeprefix("torch.")}
        raise _refuse(f"a value of type {kind.__module__}.{kind.__qualname__}")

    def _val(self, value: Any) -> Json:
        """A position in the table of tensors, {"v": value} for a plain value, or lists and tuples of such."""
        if isinstance(value, Tensor | TensorMeta):
            return self._tensor(value)
        if isinstance(value, list):
            return {"l": [self._val(v) for v in value]}
        if isinstance(value, tuple):
            return {"t": [self._val(v) for v in value]}
        return {"v": self.value(value)}

    def _tensor(self, value: Tensor | TensorMeta) -> int:
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_quantized):
            raise _refuse(f"a {value.layout} or quantized tensor")
        key = (tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."), str(value.device))
        if not all(type(size) is int for size in (*key[0], *key[1])):
            raise _refuse(f"a tensor of symbolic shape {tuple(value.shape)}")
        return self.tensors.setdefault(key, len(self.tensors))


class _Reader:
    """Decodes one graph."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        constants: Mapping[str, Tensor],
        codecs: Mapping[str, Codec],
        values: Callable[[TensorMeta], Any] | None,
    ) -> None:
        self.functions = functions
        self.constants = constants
        self.codecs = codecs
        self.values = values
        self.nodes: list[Node] = []
        self.tensors: list[TensorMeta] = []
        self.decoders: dict[str, Callable[[Any], Any]] = {
            "n": lambda body: self.nodes[body],
            "f": float,
            "t": lambda body: tuple(self.value(v) for v in body),
            "d": lambda body: {self.value(k): self.value(v) for k, v in body},
            "s": lambda body: slice(*(self.value(v) for v in body)),
            "c": lambda body: complex(self.value(body[0]), self.value(body[1])),
            "size": torch.Size,
            "device": torch.device,
            "x": lambda body: self.codecs[body[0]].decode(self.value(body[1])),
            **{tag: partial(_named, kind=kind) for tag, kind in _NAMED.items()},
        }

    def graph(self, data: Mapping[str, Json]) -> Graph:
        if data["format"] != FORMAT:
            raise SerializationError(f"a stored graph has format {data['format']}; this version reads {FORMAT}.")
        targets = [self._resolve(name) for name in data["targets"]]
        self.tensors = [
            TensorMeta(torch.Size(shape), tuple(stride), _named(dtype, torch.dtype), torch.device(device))
            for shape, stride, dtype, device in data["tensors"]
        ]
        graph = Graph()
        for op, name, target, args, kwargs, val, meta in data["nodes"]:
            node = graph.create_node(
                op,
                targets[target] if op == "call_function" else str(target),
                tuple(self.value(a) for a in args),
                {key: self.value(a) for key, a in kwargs.items()},
                name=name,
            )
            if node.name != name:
                raise SerializationError(f"a stored graph names a node '{name}', which is not a free identifier.")
            if val != []:
                node.meta["val"] = self._val(val)
            for key, value in meta.items():
                node.meta[key] = self.value(value)
            if op == "get_attr":
                self._check_constant(str(target), node.meta.get("val"))
            self.nodes.append(node)
        return graph

    def _resolve(self, name: str) -> Callable[..., Any]:
        if name == _GETITEM:
            return operator.getitem
        if name.startswith(_FUNCTION) and name.removeprefix(_FUNCTION) in self.functions:
            return self.functions[name.removeprefix(_FUNCTION)]
        match = _OPERATOR.fullmatch(name)
        found = None
        if match:
            namespace, packet, overload = match.groups()
            found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
        if not isinstance(found, OpOverload):
            raise SerializationError(
                f"a stored graph calls '{name}', which does not exist here; allowed are operators of "
                f"{', '.join(NAMESPACES)} and the functions {sorted(self.functions)}. Delete the file it came from."
            )
        return found

    def value(self, data: Json) -> Any:
        if type(data) is list:
            return [self.value(v) for v in data]
        if type(data) is dict:
            ((tag, body),) = data.items()
            return self.decoders[tag](body)
        return data

    def _val(self, data: Json) -> Any:
        if type(data) is int:
            return self.tensors[data] if self.values is None else self.values(self.tensors[data])
        ((tag, body),) = data.items()
        if tag == "v":
            return self.value(body)
        values = [self._val(v) for v in body]
        return tuple(values) if tag == "t" else values

    def _check_constant(self, name: str, val: Any) -> None:
        constant = self.constants.get(name)
        if constant is None:
            raise SerializationError(f"a stored graph needs the constant '{name}', which did not come with it.")
        if isinstance(val, Tensor | TensorMeta) and (constant.shape != val.shape or constant.dtype != val.dtype):
            raise SerializationError(
                f"constant '{name}' is {constant.dtype}{list(constant.shape)}, but the stored graph expects "
                f"{val.dtype}{list(val.shape)}; delete the file it came from."
            )


def _named(name: str, kind: type) -> Any:
    found = getattr(torch, name)
    if type(found) is not kind:
        raise ValueError(f"'{name}' is not a {kind.__name__}")
    return found
