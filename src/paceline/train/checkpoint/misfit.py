"""What does not fit between the tensors somebody has and those a module needs, told so that it can be put right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.errors import CheckpointError, nearest
from paceline.train.checkpoint.tensorfile import Spec

_SHOWN = 20


def compare(given: Mapping[str, Spec], needed: Mapping[str, Spec]) -> list[str]:
    """Return a sentence for every name that is missing, unexpected, or of another shape or type."""
    faults = []
    spare = sorted(given.keys() - needed.keys())
    for i, name in enumerate(sorted(needed.keys() - given.keys())):
        # The search for a near name is slow on thousands of names, and no more than these are shown.
        faults.append(f"missing '{name}' ({needed[name]}).{nearest(name, spare) if i < _SHOWN else ''}")
    lacking = sorted(needed.keys() - given.keys())
    for i, name in enumerate(spare):
        faults.append(f"unexpected '{name}' ({given[name]}).{nearest(name, lacking) if i < _SHOWN else ''}")
    for name in sorted(needed.keys() & given.keys()):
        if given[name] != needed[name]:
            faults.append(f"'{name}' is {given[name]}, the module has {needed[name]}.")
    return faults


def refuse_if(faults: Iterable[str], source: str, advice: str) -> None:
    """Raise when there are faults.

    Raises:
        CheckpointError: with the first of them, and how many more there are.
    """
    faults = list(faults)
    if faults:
        more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        lines = "".join(f"\n  {fault}" for fault in faults[:_SHOWN])
        raise CheckpointError(f"{source} does not fit the module:{lines}{more}\n{advice}")
