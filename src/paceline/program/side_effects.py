"""What a forward pass leaves behind in its module, besides its result.

Tracing runs a forward pass more than once, on tensors without data. Buffers that it assigns are written into the old
ones, which tracing sees; everything else that it assigns is put back, so that no trace meets what an earlier one left,
and hooks that it registers are removed, which the next trace would register once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CaptureError

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


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
        (path, part, dict(part.__dict__), dict(part._buffers), [dict(getattr(part, name)) for name in _HOOKS])
        for path, part in module.named_modules()
        if not isinstance(part, torch.jit.ScriptModule)
    ]
    try:
        yield
        for path, part, _, buffers, _ in before:
            for name, old in buffers.items():
                _write(f"{path}.{name}".lstrip("."), old, part._buffers.get(name))
    finally:
        for path, part, attributes, buffers, hooks in before:
            _restore(part._buffers, buffers)
            for name, registered in zip(_HOOKS, hooks, strict=True):
                _restore(attributes[name], registered)
            for name, old in attributes.items():
                new = part.__dict__.get(name)
                if isinstance(old, (int, float)) and new != old:
                    numbers[f"{path}.{name}".lstrip(".")] = (old, new)
            _restore(part.__dict__, attributes)


def _restore(changed: dict[str, Any], before: dict[str, Any]) -> None:
    changed.clear()
    changed.update(before)


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
