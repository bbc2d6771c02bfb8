"""What a forward pass leaves behind in its module, besides its result.

Tracing runs a forward pass more than once, on tensors without data. Buffers that it assigns are written into the old
ones, which tracing sees; everything else that it assigns is put back, so that no trace meets what an earlier one left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.errors import CaptureError


@contextlib.contextmanager
def contained(module: nn.Module, numbers: dict[str, tuple[object, object]]) -> Iterator[None]:
    """Run a forward pass of `module` inside.

    Args:
        module: the module whose forward pass runs.
        numbers: receives each number (a counter, say) that the forward pass changed, by its path, as (before, after).

    Raises:
        CaptureError: a buffer is given another shape or type.
    """
    before = [
        (path, part, dict(part.__dict__), dict(part._buffers))
        for path, part in module.named_modules()
        if not isinstance(part, torch.jit.ScriptModule)
    ]
    try:
        yield
        for path, part, _, buffers in before:
            for name, old in buffers.items():
                _write(f"{path}.{name}".lstrip("."), old, part._buffers.get(name))
    finally:
        for path, part, attributes, buffers in before:
            part._buffers.clear()
            part._buffers.update(buffers)
            for name, old in attributes.items():
                new = part.__dict__.get(name)
                if isinstance(old, (int, float)) and new != old:
                    numbers[f"{path}.{name}".lstrip(".")] = (old, new)
            part.__dict__.clear()
            part.__dict__.update(attributes)


def _write(path: str, old: Tensor | None, new: Tensor | None) -> None:
    if new is old or old is None:
        return
    if new is None or new.shape != old.shape or new.dtype != old.dtype:
        what = "nothing" if new is None else f"a tensor of shape {tuple(new.shape)}, {new.dtype}"
        raise CaptureError(
            f"the forward pass assigns {what} to the buffer '{path}', which has shape {tuple(old.shape)}, {old.dtype}. "
            "A buffer of a program keeps its shape and type: allocate it whole in __init__ and write into it."
        )
    old.copy_(new.detach())
