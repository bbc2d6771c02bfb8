"""Exchanges for windows start as soon as their input exists, and are waited for just before their result is read."""

from __future__ import annotations

from torch.fx import Graph, Node

from paceline.placement.windows import window, window_sum
from paceline.runtime import collectives


def start_windows(graph: Graph) -> None:
    """Move the windows of a forward or backward graph to where they can start, and let their readers wait; in place."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (window, window_sum):
            continue
        readers = list(node.users)
        if not readers:
            continue
        with graph.inserting_before(min(readers, key=lambda reader: order[reader])):
            waited = graph.call_function(collectives.wait, (node,))
        waited.meta = dict(node.meta)
        node.replace_all_uses_with(waited, delete_user_cb=lambda user, mine=waited: user is not mine)
        _next_call(node.args[0]).prepend(node)


def _next_call(node: object) -> Node:
    """The first place behind a node at which calls may stand."""
    assert isinstance(node, Node)
    following = node.next
    while following.op in ("placeholder", "get_attr"):
        following = following.next
    return following
