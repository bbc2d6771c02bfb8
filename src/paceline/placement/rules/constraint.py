"""`constrain`: a user's word on where a tensor lives; the placement itself is looked up where options are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paceline.placement.rules.rule import AxisRule, Call, Strategy, Written, rule
from paceline.placement.rules.words import labels_in, numbered
from paceline.program import constraint  # noqa: F401  (registers the operator)

if TYPE_CHECKING:
    from paceline.placement.writer import Writer

aten = torch.ops.aten
CONSTRAIN = torch.ops.paceline.constrain.default


@rule(CONSTRAIN)
def _constrain(call: Call) -> AxisRule:
    """Whatever its input is; nothing is left of it in a placed program but a name."""

    def write(writer: Writer, arguments: Mapping[str, Any], strategy: Strategy) -> Sequence[Node]:
        return [writer.call(aten.alias.default, arguments["x"])]

    axes = numbered(len(call.inputs[0]))
    split = labels_in([axes])
    return AxisRule((axes,), (axes,), split, linear=((0,),), written=dict.fromkeys((None, *split), Written(write)))
