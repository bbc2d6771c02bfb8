"""Whether the pieces of a tensor in a checkpoint are all of it, each element once."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.placement.boxes import Box


def flaw(boxes: Iterable[Box], shape: tuple[int, ...]) -> str | None:
    """Say why `boxes` are not an exact cover of a tensor of `shape`, or None when every element is in exactly one."""
    whole = Box.whole(shape)
    filled = [box for box in boxes if box.size]
    for box in filled:
        if len(box.shape) != len(shape) or box.intersect(whole) != box:
            return f"piece {box} lies outside shape {list(shape)}"
    if shape:
        # Boxes are compared with those that they meet along one dimension: the one that was cut into most.
        swept = max(range(len(shape)), key=lambda dim: len({box.offset[dim] for box in filled}))
        filled.sort(key=lambda box: (box.offset[swept], box.offset))
    for i, box in enumerate(filled):
        for other in filled[i + 1 :]:
            if shape and other.offset[swept] >= box.offset[swept] + box.shape[swept]:
                break  # whatever follows begins even later
            if box.intersect(other):
                return f"pieces {box} and {other} overlap"
    missing = whole.size - sum(box.size for box in filled)
    return f"{missing} of {whole.size} elements are in no piece" if missing else None
