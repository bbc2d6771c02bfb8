"""Cross-entropies of captured graphs, rewritten so that they pass over their logits seldom and can be split."""

from __future__ import annotations

from torch.fx import Graph

from paceline.program.cross_entropy.fused import fuse
from paceline.program.cross_entropy.whole import take_whole_sequences


def rewrite_cross_entropies(graph: Graph) -> None:
    """Rewrite what is known to be one; everything else is left as it is."""
    take_whole_sequences(graph)
    fuse(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
