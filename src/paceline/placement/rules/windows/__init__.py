"""Rules of operators whose results come from windows of a dimension: pools, resizing, padding, cuts and shifts."""

from paceline.placement.rules.windows import (  # noqa: F401  (importing a family registers its rules)
    cutting,
    halo,
    padding,
    patches,
    pooling,
    resizing,
    shifting,
)
