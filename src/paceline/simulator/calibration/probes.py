"""Calls by which a machine is known: products, attention, elementwise work and the smallest call, by size and type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from paceline.program.fake import fake_mode
from paceline.runtime.exemplars import Exemplars
from paceline.runtime.operator_calls import key_of

aten = torch.ops.aten
_SIDES = (64, 256, 1024)
_ODD = ((129, 257, 515), (509, 511, 513), (1023, 255, 65))
_HALF = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024))
_HEADS = ((8, 128, 32), (8, 256, 64), (4, 512, 64))
_ELEMENTS = (1 << 18, 1 << 20, 1 << 22, 1 << 23)
_UPDATED = 1 << 21
_SMALL = range(16, 25)
_ADAMW: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}


class Family(StrEnum):
    """What a probe tells of."""

    PRODUCT = "product"
    ATTENTION = "attention"
    TOUCH = "memory"
    UPDATE = "optimizer"
    CALL = "call"


@dataclass(frozen=True)
class Probe:
    """One call.

    Attributes:
        family: what it tells of.
        name: for people.
        dtype: of its tensors, by name.
        dims: of a product: rows, columns, inner dimension; of attention: heads, queries, size of a head; of
            a smallest call: elements.
        nbytes: that it reads and writes.
    """

    family: Family
    name: str
    dtype: str = "float32"
    dims: tuple[int, int, int] = (0, 0, 0)
    nbytes: float = 0.0

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        first, second, third = self.dims
        return {Family.PRODUCT: 2.0 * first * second * third, Family.ATTENTION: 4.0 * first * second**2 * third}.get(
            self.family, 0.0
        )


class Probing:
    """Times all probes on a device, round by round.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        self._graph = Graph()
        self._device = device
        self._keys: dict[Probe, str] = {}
        with fake_mode():
            for probe in probes():
                self._keys[probe] = self._call(probe)
        self._graph.output(())
        self._exemplars = Exemplars([self._graph], device)

    def round(self, *, counts: bool = True) -> None:
        """Run each once."""
        self._exemplars.round(counts=counts)

    @property
    def seconds(self) -> dict[Probe, float]:
        """What each takes; without those that the device cannot do."""
        found = self._exemplars.seconds
        return {probe: found[key] for probe, key in self._keys.items() if key in found}

    def _call(self, probe: Probe) -> str:
        dtype = getattr(torch, probe.dtype)
        first, second, third = probe.dims
        match probe.family:
            case Family.PRODUCT:
                return self._node(aten.mm.default, [(first, third), (third, second)], dtype)
            case Family.ATTENTION:
                return self._node(aten.scaled_dot_product_attention.default, [(1, first, second, third)] * 3, dtype)
            case Family.UPDATE:
                return self._update(int(probe.nbytes) // (7 * dtype.itemsize))
            case Family.CALL:
                return self._node(aten.add.Tensor, [(first,)] * 2, dtype)
        name = probe.name.split()[0]
        target, given = {
            "add": (aten.add.Tensor, 2),
            "copy": (aten.clone.default, 1),
            "gelu": (aten.gelu.default, 1),
            "softmax": (aten._softmax.default, 1),
        }[name]
        count = int(probe.nbytes) // (dtype.itemsize * (given + 1))
        shape = (count // 256, 256) if name == "softmax" else (count,)
        return self._node(target, [shape] * given, dtype, *((-1, False) if name == "softmax" else ()))

    def _node(self, target: Any, shapes: list[tuple[int, ...]], dtype: torch.dtype, *others: Any) -> str:
        inputs = [self._given(shape, dtype) for shape in shapes]
        node = self._graph.call_function(target, (*inputs, *others))
        node.meta["val"] = target(*(each.meta["val"] for each in inputs), *others)
        return key_of(node)

    def _update(self, count: int) -> str:
        lists = [[self._given((count,), torch.float32)] for _ in range(4)]
        flags = {"amsgrad": False, "maximize": False}
        node = self._graph.call_function(aten._fused_adamw_.default, (*lists, [], [None]), {**_ADAMW, **flags})
        node.meta["val"] = None
        return key_of(node)

    def _given(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        node = self._graph.placeholder(f"given_{len(self._graph.nodes)}")
        value: Tensor = torch.empty(shape, dtype=dtype, device=self._device)
        node.meta["val"] = value
        return node


def probes() -> Iterator[Probe]:
    """Yield them."""
    for rows, columns, inner in (*product(_SIDES, repeat=3), *_ODD):
        yield _product("float32", rows, columns, inner)
    for sizes in _HALF:
        yield _product("bfloat16", *sizes)
    for heads, time, width in _HEADS:
        yield Probe(Family.ATTENTION, f"attention {heads} heads, {time} x {width}", dims=(heads, time, width))
    for name, tensors in (("add", 3), ("copy", 2), ("gelu", 2), ("softmax", 2)):
        for count in _ELEMENTS:
            nbytes = 4.0 * tensors * count
            yield Probe(Family.TOUCH, f"{name} {nbytes / (1 << 20):g} MiB", nbytes=nbytes)
    yield Probe(Family.UPDATE, f"AdamW {_UPDATED} elements", nbytes=28.0 * _UPDATED)
    for count in _SMALL:  # several, so that most of them find the caches as small calls in a row do
        yield Probe(Family.CALL, f"add {count} numbers", dims=(count, 0, 0))


def _product(dtype: str, rows: int, columns: int, inner: int) -> Probe:
    return Probe(Family.PRODUCT, f"{rows} x {inner} by {inner} x {columns}", dtype, (rows, columns, inner))
