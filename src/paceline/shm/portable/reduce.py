"""Reductions of the portable group, in the order of ranks, so that all ranks get the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from paceline.shm.portable.window import Bytes

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_Steps = dict[str, Callable[..., Tensor]]
_TRUTH: _Steps = {
    "SUM": torch.logical_or,
    "PRODUCT": torch.logical_and,
    "MIN": torch.logical_and,
    "MAX": torch.logical_or,
    "BAND": torch.logical_and,
    "BOR": torch.logical_or,
    "BXOR": torch.logical_xor,
}
_SUMS: _Steps = {"SUM": torch.add, "PRODUCT": torch.mul}
_MEANS: _Steps = {**_SUMS, "AVG": torch.add}
_ORDER: _Steps = {"MIN": torch.minimum, "MAX": torch.maximum}
_BITS: _Steps = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
_NUMBERS: _Steps = {**_MEANS, **_ORDER}
_INTEGERS: _Steps = {**_SUMS, **_ORDER, **_BITS}
_LOW_PRECISION = (torch.float16, torch.bfloat16)

# The types that PyTorch itself adds.
_KNOWN: dict[torch.dtype, _Steps] = {
    torch.bool: _TRUTH,
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), _INTEGERS),
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), _NUMBERS),
    **dict.fromkeys((torch.complex64, torch.complex128), _MEANS),
}


class Reduction:
    """Reduces the parts of all ranks. Half precision is reduced in float32 and rounded once.

    Raises:
        ValueError: There is no such operation on this type.
    """

    def __init__(self, op: ReduceOp, dtype: torch.dtype) -> None:
        name = next((name for name in _NAMES if op == getattr(ReduceOp, name)), str(op))
        known = _KNOWN.get(dtype, {})
        if name not in known:
            allowed = ", ".join(known) or "nothing; use .view() or .to() for another type"
            raise ValueError(f"shm: ReduceOp.{name} does not go with {dtype}, for which there is {allowed}")
        self.name = name
        self._dtype = dtype
        self._step = known[name]

    def __call__(self, parts: Sequence[Bytes], into: Bytes) -> None:
        """Reduce the first bytes of all parts to `into`, which is not in the memory of a part."""
        result = torch.from_numpy(into).view(self._dtype)
        first, *rest = (torch.from_numpy(part[: into.size]).view(self._dtype) for part in parts)
        if self._dtype in _LOW_PRECISION:
            total = first.float()
            for part in rest:
                self._step(total, part.float(), out=total)
        elif rest:
            total = self._step(first, rest[0], out=result)
            for part in rest[1:]:
                self._step(total, part, out=total)
        else:
            total = result.copy_(first)
        if self.name == "AVG":
            total.div_(len(parts))
        if total is not result:
            result.copy_(total)
