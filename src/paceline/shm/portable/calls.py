"""What each collective of the portable group shows and takes: tensors of c10d on one side, bytes on the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from paceline.shm.portable.reduce import Reduction
from paceline.shm.portable.rounds import Call, Shown
from paceline.shm.portable.window import Bytes


class _Memory:
    """Gives NumPy the memory of a contiguous tensor, and keeps it.

    Plain memory: autograd, inference mode and dispatch modes are no concern of an exchange.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "version": 3,
        }


class Flat:
    """The elements of a tensor as bytes, in logical order; in a copy where its memory has another order."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise ValueError(
                f"shm: exchanges dense tensors on the CPU; this one is {tensor.layout} on {tensor.device}: "
                "use .to_dense(), .cpu(), or another backend"
            )
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        self.tensor = tensor
        self._held = tensor if is_plain else tensor.detach().resolve_conj().resolve_neg().contiguous()
        self.dtype = tensor.dtype
        self.numel = tensor.numel()
        self.bytes: Bytes = np.asarray(_Memory(self._held)) if self.numel else np.empty(0, np.uint8)

    def give_back(self) -> None:
        """Put what was written to the bytes into the tensor."""
        if self._held is not self.tensor:
            with torch.inference_mode():
                self.tensor.copy_(self._held)

    def __str__(self) -> str:
        return f"{self.numel} x {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Step:
    """A collective and the tensors that it changes."""

    call: Call
    outputs: Sequence[Flat] = ()


@dataclass(frozen=True)
class Place:
    """A rank in a group; makes its steps."""

    rank: int
    size: int

    def broadcast(self, tensor: Tensor, root: int) -> Step:
        """From the root to all."""
        flat, is_root = Flat(tensor), self.rank == root

        def take(lo: int, hi: int, shown: Shown) -> None:
            if not is_root:
                _copy(flat.bytes[lo:hi], shown(root, 0))

        lanes = [flat.bytes] if is_root else []
        return Step(Call(f"broadcast from {root}, {flat}", lanes, 1, flat.bytes.size, take), [flat])

    def reduce(self, tensor: Tensor, op: ReduceOp, root: int | None) -> Step:
        """To the root, or to all if it is None."""
        flat = Flat(tensor)
        reduction = Reduction(op, flat.dtype)
        ranks, is_wanted = range(self.size), root in (None, self.rank)

        def take(lo: int, hi: int, shown: Shown) -> None:
            if is_wanted:
                reduction([shown(rank, 0) for rank in ranks], flat.bytes[lo:hi])

        text = f"{'all_reduce' if root is None else f'reduce to {root}'}, {reduction.name}, {flat}"
        return Step(Call(text, [flat.bytes], 1, flat.bytes.size, take), [flat])

    def gather(self, outputs: list[Tensor], given: Tensor, root: int | None) -> Step:
        """To the root, or to all if it is None; `outputs` are a tensor for each rank, or one for all."""
        flat, flats, parts = Flat(given), [], []
        if root in (None, self.rank):
            flats = [Flat(tensor) for tensor in outputs]
            parts = self._parts("the output", flats, flat)

        def take(lo: int, hi: int, shown: Shown) -> None:
            for rank, part in enumerate(parts):
                _copy(part[lo:hi], shown(rank, 0))

        text = f"{'all_gather' if root is None else f'gather to {root}'}, {flat}"
        return Step(Call(text, [flat.bytes], 1, flat.bytes.size, take), flats)

    def scatter(self, output: Tensor, given: list[Tensor], root: int) -> Step:
        """From the root to each rank its part."""
        flat, own = Flat(output), self.rank
        lanes = self._parts("the input", [Flat(tensor) for tensor in given], flat) if own == root else []

        def take(lo: int, hi: int, shown: Shown) -> None:
            _copy(flat.bytes[lo:hi], shown(root, own))

        return Step(Call(f"scatter from {root}, {flat}", lanes, self.size, flat.bytes.size, take), [flat])

    def reduce_scatter(self, output: Tensor, given: list[Tensor], op: ReduceOp) -> Step:
        """To each rank its part of the sum; `given` are a tensor for each rank, or one for all."""
        flat, own, ranks = Flat(output), self.rank, range(self.size)
        lanes = self._parts("the input", [Flat(tensor) for tensor in given], flat)
        reduction = Reduction(op, flat.dtype)

        def take(lo: int, hi: int, shown: Shown) -> None:
            reduction([shown(rank, own) for rank in ranks], flat.bytes[lo:hi])

        text = f"reduce_scatter, {reduction.name}, {flat}"
        return Step(Call(text, lanes, self.size, flat.bytes.size, take), [flat])

    def exchange(self, outputs: list[Tensor], inputs: list[Tensor]) -> Step:
        """From each rank to each rank a tensor of its list."""
        takes, gives = [Flat(tensor) for tensor in outputs], [Flat(tensor) for tensor in inputs]
        return self._exchange(takes, gives, [flat.bytes for flat in takes], [flat.bytes for flat in gives])

    def exchange_rows(
        self, output: Tensor, given: Tensor, output_splits: list[int] | None, input_splits: list[int] | None
    ) -> Step:
        """From each rank to each rank some rows of its tensor; the same number if the splits are empty."""
        takes, gives = Flat(output), Flat(given)
        return self._exchange([takes], [gives], self._rows(takes, output_splits), self._rows(gives, input_splits))

    def _exchange(
        self, outputs: Sequence[Flat], inputs: Sequence[Flat], takes: Sequence[Bytes], gives: Sequence[Bytes]
    ) -> Step:
        types = sorted({str(flat.dtype) for flat in [*outputs, *inputs]})
        if len(takes) != self.size or len(gives) != self.size or len(types) > 1:
            raise ValueError(
                f"shm: all_to_all takes one part for each of {self.size} ranks, all of one type; given are "
                f"{len(gives)} to send and {len(takes)} to receive, of {', '.join(types)}"
            )
        own = self.rank

        def take(lo: int, hi: int, shown: Shown) -> None:
            for rank, part in enumerate(takes):
                _copy(part[lo:hi], shown(rank, own))

        table = [part.size for part in [*gives, *takes]]
        return Step(Call(f"all_to_all, {types[0]}", gives, self.size, 0, take, table), outputs)

    def _parts(self, name: str, flats: list[Flat], one: Flat) -> list[Bytes]:
        """Return the part of each rank, each as large as `one`."""
        is_joined = len(flats) == 1 and flats[0].numel == self.size * one.numel
        parts = np.split(flats[0].bytes, self.size) if is_joined else [flat.bytes for flat in flats]
        sizes, types = [part.size for part in parts], {flat.dtype for flat in flats}
        if sizes != [one.bytes.size] * self.size or types != {one.dtype}:
            raise ValueError(
                f"shm: {name} must be {self.size} tensors of {one}, one for each rank, or one of as much; given is "
                f"[{', '.join(map(str, flats))}]"
            )
        return parts

    def _rows(self, flat: Flat, splits: list[int] | None) -> list[Bytes]:
        rows = flat.tensor.shape[0] if flat.tensor.dim() else 0
        splits = splits or [rows // self.size] * self.size
        if sum(splits) != rows or len(splits) != self.size or min(splits) < 0:
            raise ValueError(
                f"shm: all_to_all cannot split {rows} rows among {self.size} ranks as {splits}: give a number for "
                f"each rank, {rows} in all, or none and rows that {self.size} divides"
            )
        row = math.prod(flat.tensor.shape[1:]) * flat.tensor.element_size()
        ends = np.cumsum(splits) * row
        return [flat.bytes[end - count * row : end] for end, count in zip(ends.tolist(), splits, strict=True)]


def _copy(into: Bytes, shown: Bytes) -> None:
    into[:] = shown[: into.size]
