"""Sub-modules that stand beside each other and look alike: what may be captured once instead of many times.

They are numbered by their parent, as those of a list are: projections of queries, keys and values are no blocks. They
are of one class, with attributes, parameters, buffers and children alike. Numbers that count siblings, and rates
that differ from one to the next, do not tell them apart: what they compute does, which `rehearsal` watches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType

from torch import Tensor, nn

LEAST = 4
"""Siblings from which on some need not be captured: see `KEPT`."""
KEPT = 3
"""Siblings that are captured in any case: the first, the last, and one between, whose neighbours are like itself."""
_COUNTING = ("idx", "index", "layer_id", "layer_number", "layer_num", "depth_id")
_Ints = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Siblings:
    """Sub-modules that look alike, by their paths in the user's module, in order."""

    members: Mapping[str, nn.Module]


def siblings(root: nn.Module) -> list[Siblings]:
    """Return all sets of siblings that look alike and are many enough; sets inside of members are sets of their own.

    Members that share parameters with others are left out.
    """
    shared = _shared(root)
    looks: dict[nn.Module, tuple[Hashable, _Ints]] = {}
    found = []
    for path, parent in root.named_modules():
        alike: dict[Hashable, dict[str, nn.Module]] = defaultdict(dict)
        for name, child in parent.named_children():
            tensors = [*child.parameters(), *child.buffers()]
            is_numbered = name[-1:].isdecimal() and any(True for _ in child.parameters())
            if is_numbered and not any(id(tensor) in shared for tensor in tensors):
                alike[_look(child, looks)[0]][f"{path}.{name}".lstrip(".")] = child
        for members in alike.values():
            for equal in _told_apart(members, looks):
                if len(equal) >= LEAST:
                    found.append(Siblings(equal))
    return found


def _shared(root: nn.Module) -> set[int]:
    """Return the identities of tensors that the module has under several names."""
    named = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    counts = Counter(id(tensor) for _, tensor in named)
    return {identity for identity, count in counts.items() if count > 1}


def _told_apart(
    members: Mapping[str, nn.Module], looks: Mapping[nn.Module, tuple[Hashable, _Ints]]
) -> Iterator[dict[str, nn.Module]]:
    """Yield members whose whole numbers are alike, but for those that count members."""
    numbers = [looks[member][1] for member in members.values()]
    telling = [slot for slot in range(len(numbers[0])) if not _counts([row[slot] for row in numbers])]
    equal: dict[Hashable, dict[str, nn.Module]] = defaultdict(dict)
    for (path, member), row in zip(members.items(), numbers, strict=True):
        equal[tuple(row[slot] for slot in telling)][path] = member
    yield from equal.values()


def _counts(values: Sequence[tuple[str, int]]) -> bool:
    """Whether a number counts siblings: it says so, or it goes up by one from each to the next."""
    name, first = values[0]
    if any(word in name for word in _COUNTING):
        return True
    return len(values) > 1 and all(value == first + position for position, (_, value) in enumerate(values))


def _look(module: nn.Module, known: dict[nn.Module, tuple[Hashable, _Ints]]) -> tuple[Hashable, _Ints]:
    """Return what siblings that are alike have in common, and the whole numbers in them, by name."""
    if module in known:
        return known[module]
    simple: list[Hashable] = []
    numbers: list[tuple[str, int]] = []
    for name, value in sorted(module.__dict__.items()):
        if name.startswith("_"):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            numbers.append((name, value))
            simple.append(name)
        elif isinstance(value, (str, bool, tuple, FunctionType, BuiltinFunctionType, type(None))):
            simple.append((name, repr(value)))
    tensors: list[Hashable] = []
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        tensors.append((name, None if tensor is None else _tensor(tensor)))
    children: list[Hashable] = []
    for name, child in module.named_children():
        look, inner = _look(child, known)
        children.append((name, look))
        numbers += [(f"{name}.{key}", value) for key, value in inner]
    known[module] = (type(module), tuple(simple), tuple(tensors), tuple(children)), tuple(numbers)
    return known[module]


def _tensor(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


__all__ = ["KEPT", "LEAST", "Siblings", "siblings"]
