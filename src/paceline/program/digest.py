"""A hash of values and of the code they can reach that is the same in every process.

Pickle is not: it depends on which equal strings are one object, on the order of sets and on addresses. Values are
walked in the order in which they hold each other. Tensors that are inputs of a program are described, all others are
hashed by content. Functions are hashed by bytecode and followed by name, through globals and through methods of the
classes seen so far, so that replacing a function of a library at run time is noticed as well as an edit.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import inspect
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor

from paceline.errors import FingerprintError
from paceline.program.sources import LoadedModules, Origin

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, OpOverload, OpOverloadPacket)
_TENSORS = (Tensor, nn.Parameter, FakeTensor)
# Hugging Face's GenerationConfig keeps Python's hash of its own text, which is another number in every process.
_UNSTABLE = ("_original_object_hash",)
_LOAD_GLOBAL, _LOAD_NAME = dis.opmap["LOAD_GLOBAL"], dis.opmap["LOAD_NAME"]
# Where the ranks of this run meet: another at every start, and nothing that a forward pass depends on.
_OF_THE_LAUNCH = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_JOBID"}
_BY_CONSTRUCTION = {"__new__", "__init__", "__post_init__"}
_NOT_CALLED = {
    "__init_subclass__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__repr__",
    "__str__",
}
_NOT_DATA = {"__doc__", "__module__", "__qualname__", "__annotations__", "__dict__", "__weakref__", "__slots__"}
_NOT_DATA |= {"_abc_impl", "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__abstractmethods__"}
_NOT_DATA |= {"__orig_bases__", "__parameters__", "__static_attributes__", "__firstlineno__"}


class Digest:
    """One hash in the making.

    Args:
        described: tensors whose shape, strides, dtype, device, requires_grad and sharing count, but not their values.
        loaded: the modules that code may come from.
    """

    def __init__(self, described: Iterable[Tensor], loaded: LoadedModules) -> None:
        self._hash = hashlib.sha256()
        self._described = {id(tensor) for tensor in described}
        self._loaded = loaded
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an address is an identity only while its object lives
        self._storages: dict[int, int] = {}
        self._hook_ids: dict[int, int] = {}
        self._functions: deque[FunctionType] = deque()
        self._names: set[str] = set()
        self._texts: set[str] = set()
        self._methods: dict[str, list[Any]] = {}
        self.packages: set[str] = set()
        """Top-level packages, installed ones, of the classes that were met."""

    def hexdigest(self) -> str:
        """Follow the code that was met, then return the hash of everything."""
        try:
            while self._functions:
                self._follow(self._functions.popleft())
        except RecursionError as error:
            raise FingerprintError("a value is nested too deeply") from error
        return self._hash.hexdigest()

    def mentions(self, name: str) -> bool:
        """Return whether the code that was followed holds this name: of a variable, an attribute, or as a text."""
        return name in self._names or name in self._texts

    def add(self, value: Any) -> None:
        """Hash a value of any kind.

        Raises:
            FingerprintError: there is no stable way to hash it; the message says what and where.
        """
        try:
            self._value(value)
        except RecursionError as error:
            raise FingerprintError("a value is nested too deeply") from error

    def _put(self, kind: str, text: str = "") -> None:
        self._hash.update(f"{kind}:{len(text)}:{text};".encode("utf-8", "surrogatepass"))

    def _is_new(self, value: Any) -> bool:
        number = self._seen.get(id(value))
        if number is not None:
            self._put("again", str(number))
            return False
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return True

    # ---- values ----

    def _value(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._put(kind.__name__, repr(value))
        elif kind is tuple or kind is torch.Size:
            self._items(kind.__name__, value)
        elif isinstance(value, _NAMED):
            self._put(kind.__name__, str(value))
        elif isinstance(value, ModuleType):
            self._put("module", value.__name__)
        elif self._is_new(value):
            self._object(value)

    def _object(self, value: Any) -> None:
        kind = type(value)
        if kind is list:
            self._items("list", value)
        elif kind is dict or kind is OrderedDict or kind is MappingProxyType:
            self._items("dict", (part for item in list(value.items()) if item[0] not in _UNSTABLE for part in item))
        elif kind is set or kind is frozenset:
            self._items("set", sorted(value, key=_sort_key))
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, FunctionType):
            self._put("function", f"{value.__module__}.{value.__qualname__}")
            self._functions.append(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, CodeType):
            self._code(value)
        elif kind is MethodType:
            self._items("method", [value.__func__, value.__self__])
        elif kind in (staticmethod, classmethod, property, functools.cached_property) or isinstance(
            value, functools._lru_cache_wrapper
        ):
            self._items(kind.__name__, _functions_in(value))
        elif isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | None):
            self._items("method", [value.__name__, value.__self__])
        elif isinstance(value, weakref.ref):
            self._items("weakref", [value()])
        elif isinstance(value, torch.Generator):
            self._items("generator", [str(value.device), value.get_state()])
        else:
            self._reduced(value)

    def _items(self, kind: str, values: Iterable[Any]) -> None:
        self._put(kind)
        for value in values:
            self._value(value)
        self._put("end")

    def _reduced(self, value: Any) -> None:
        """Hash an object as pickle would take it apart."""
        kind = type(value)
        try:
            reducer = copyreg.dispatch_table.get(kind)
            parts = reducer(value) if reducer else value.__reduce_ex__(4)
        except Exception as error:  # the object's own code, which may fail in any way
            raise FingerprintError(f"a {kind.__module__}.{kind.__qualname__} cannot be hashed: {error}") from error
        if isinstance(parts, str):
            self._put("global", f"{getattr(value, '__module__', None)}.{parts}")
            return
        self._items("object", [kind, *parts[:3]])
        for more in parts[3:5]:
            self._items("items", more or ())

    def _tensor(self, tensor: Tensor) -> None:
        if type(tensor) not in _TENSORS or tensor.layout is not torch.strided:
            raise FingerprintError(f"a tensor is a {type(tensor).__qualname__} of layout {tensor.layout}")
        storage = self._storages.setdefault(tensor.untyped_storage()._cdata, len(self._storages))
        self._put(
            type(tensor).__name__,
            f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device} {tensor.requires_grad} "
            f"{storage} {tensor.storage_offset()} {tensor.is_conj()} {tensor.is_neg()}",
        )
        hooks = [tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)]
        for table in hooks:
            self._items("hooks", list((table or {}).values()))
        self._alive.append(tensor.untyped_storage())
        if not isinstance(tensor, FakeTensor):
            self._value(vars(tensor))
        if id(tensor) in self._described:
            return
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            raise FingerprintError("a tensor that is neither a parameter nor a buffer has no values (fake or meta)")
        data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._hash.update(data.numpy().data)

    def _module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise FingerprintError("a ScriptModule hides its code")
        self._value(type(module))
        self._put("state")
        for name, value in list(vars(module).items()):
            self._put("attribute", name)
            if "_hooks" in name and isinstance(value, dict):
                for key, hook in list(value.items()):  # keys count all hooks this process ever made
                    self._put("hook", str(self._hook_ids.setdefault(key, len(self._hook_ids))))
                    self._value(hook)
            else:
                try:
                    self._value(value)
                except FingerprintError as error:
                    raise FingerprintError(f"{type(module).__qualname__}.{name}: {error}") from error
        self._put("end")

    # ---- code ----

    def _class(self, kind: type) -> None:
        self._put("class", f"{kind.__module__}.{kind.__qualname__}")
        for base in kind.__mro__:
            origin = self._loaded.origin(base.__module__)
            if origin is Origin.FIXED:
                if issubclass(base, nn.Module):
                    self._items("torch", [base.forward, base.__call__])
                continue
            if origin is Origin.INSTALLED:
                self.packages.add(base.__module__.partition(".")[0])
            if self._seen.get(id(base)) is None or base is kind:
                self._seen.setdefault(id(base), len(self._seen))
                self._members(base)

    def _members(self, kind: type) -> None:
        for name, member in sorted(vars(kind).items()):
            functions = list(_functions_in(member))
            for function in functions:
                self._methods.setdefault(name, []).append(function)
                is_special = name.startswith("__") and name not in _BY_CONSTRUCTION | _NOT_CALLED
                if name == "forward" or is_special or name in self._names:
                    self._value(function)
            if not functions and name not in _NOT_DATA and not inspect.isdatadescriptor(member):
                self._put("member", name)
                self._tolerant(member)

    def _tolerant(self, value: Any) -> None:
        """Hash what can be: values beside the module's own state, of which many are locks, loggers and registries."""
        try:
            self._value(value)
        except FingerprintError:
            self._put("opaque", type(value).__qualname__)

    def _follow(self, function: FunctionType) -> None:
        home = function.__globals__.get("__name__", "")
        origin = self._loaded.origin(home)
        self._put("code", f"{home}.{function.__qualname__}")
        self._code(function.__code__)
        cells = [_content(cell) for cell in function.__closure__ or ()]
        wrapped = vars(function).get("__wrapped__")
        if origin is Origin.FIXED:
            # Decorators of PyTorch hold the user's function in their closure; the rest of it is theirs.
            for value in (*cells, wrapped):
                if isinstance(value, FunctionType | MethodType | type):
                    self._value(value)
            return
        for value in (function.__defaults__, function.__kwdefaults__, *cells, wrapped):
            self._value(value) if origin is Origin.USER else self._tolerant(value)
        names = _names(function.__code__)
        for name in sorted(names):
            if name in function.__globals__:
                self._global(function, name, names)
            if name not in self._names:
                self._names.add(name)
                for method in self._methods.get(name, ()):
                    self._value(method)
        texts = _texts(function.__code__)
        self._texts |= texts
        if names & {"environ", "getenv"}:
            for text in sorted((texts & os.environ.keys()) - _OF_THE_LAUNCH):
                self._put("environment", f"{text}={os.environ[text]}")

    def _global(self, function: FunctionType, name: str, names: set[str]) -> None:
        value = function.__globals__[name]
        self._put("name", name)
        if isinstance(value, ModuleType):
            self._module_members(value, names, set())
        elif isinstance(value, type):
            self._constructed(value)
        elif isinstance(value, FunctionType | MethodType | BuiltinFunctionType | functools._lru_cache_wrapper):
            self._value(value)
        elif name in _globals_of(function.__code__):
            is_own = self._loaded.origin(function.__globals__.get("__name__", "")) is Origin.USER
            self._value(value) if is_own else self._tolerant(value)

    def _module_members(self, module: ModuleType, names: set[str], visited: set[int]) -> None:
        if id(module) in visited:
            return
        visited.add(id(module))
        self._put("module", module.__name__)
        is_fixed = self._loaded.origin(module.__name__) is Origin.FIXED
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            if isinstance(value, ModuleType):
                self._module_members(value, names, visited)
            elif isinstance(value, type):
                self._constructed(value)
            elif isinstance(value, FunctionType) or not is_fixed:
                self._tolerant(value)

    def _constructed(self, kind: type) -> None:
        """Hash a class that code names, and so may call."""
        self._value(kind)
        if self._loaded.origin(kind.__module__) is not Origin.FIXED:
            for name in sorted(_BY_CONSTRUCTION & vars(kind).keys()):
                for function in _functions_in(vars(kind)[name]):
                    self._value(function)

    def _code(self, code: CodeType) -> None:
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._put("bytecode", f"{code.co_name} {shape} {names} {code.co_code.hex()} {code.co_exceptiontable.hex()}")
        for constant in code.co_consts:
            self._code(constant) if isinstance(constant, CodeType) else self._value(constant)


def _functions_in(member: Any) -> Iterable[Any]:
    """Yield the functions that a member of a class stands for."""
    if isinstance(member, FunctionType):
        yield member
    elif isinstance(member, staticmethod | classmethod | MethodType):
        yield from _functions_in(member.__func__)
    elif isinstance(member, property):
        for function in (member.fget, member.fset, member.fdel):
            yield from _functions_in(function)
    elif isinstance(member, functools.cached_property):
        yield from _functions_in(member.func)
    elif isinstance(member, functools._lru_cache_wrapper):
        yield from _functions_in(member.__wrapped__)


def _sort_key(value: Any) -> str:
    """Return a text that orders the elements of a set in the same way in every process."""
    if isinstance(value, tuple | frozenset):
        return f"({','.join(map(_sort_key, value) if isinstance(value, tuple) else sorted(map(_sort_key, value)))})"
    if type(value) in _PLAIN or isinstance(value, _NAMED):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    raise FingerprintError(f"a set holds a {type(value).__qualname__}: its order differs between processes")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names(code: CodeType) -> set[str]:
    return {name for part in _codes(code) for name in part.co_names}


def _texts(code: CodeType) -> set[str]:
    return {text for part in _codes(code) for text in part.co_consts if isinstance(text, str)}


def _globals_of(code: CodeType) -> set[str]:
    """Return the names that code reads as globals, not as attributes. Reading bytes is ten times as fast as `dis`."""
    found = set()
    for part in _codes(code):
        content, extended = part.co_code, 0  # pairs of opcode and argument; inline caches read as zeros
        for opcode, low in zip(content[::2], content[1::2], strict=True):
            argument = extended << 8 | low
            extended = argument if opcode == dis.EXTENDED_ARG else 0
            if opcode == _LOAD_GLOBAL:
                found.add(part.co_names[argument >> 1])
            elif opcode == _LOAD_NAME:
                found.add(part.co_names[argument])
    return found
