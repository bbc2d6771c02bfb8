"""Exchanges for windows start as soon as their input exists, and are waited for just before their result is read.

What the backward pass takes windows of exists when it begins; so that not all of them are under way at once, a few are.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from paceline.placement.windows import window, window_sum
from paceline.runtime import collectives

_MOST_UNDER_WAY = 3


def start_windows(graph: Graph) -> None:
    """Move the windows of a forward or backward graph to where they start, and let their readers wait; in place."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    first_reader = {
        node: min(node.users, key=lambda reader: order[reader])
        for node in graph.nodes
        if node.op == "call_function" and node.target in (window, window_sum) and node.users
    }
    waits: list[Node] = []
    for node in sorted(first_reader, key=lambda node: order[first_reader[node]]):
        with graph.inserting_before(first_reader[node]):
            waited = graph.call_function(collectives.wait, (node,))
        waited.meta = dict(node.meta)
        node.replace_all_uses_with(waited, delete_user_cb=lambda user, mine=waited: user is not mine)
        ended = waits[len(waits) - _MOST_UNDER_WAY :][:1] if len(waits) >= _MOST_UNDER_WAY else []
        _next_call(_last(graph, [*node.all_input_nodes, *ended])).prepend(node)
        waits.append(waited)


def _last(graph: Graph, nodes: list[Node]) -> Node:
    found: Node = next(node for node in reversed(graph.nodes) if node in nodes)
    return found


def _next_call(node: Node) -> Node:
    """The first place behind a node at which calls may stand."""
    following = node.next
    while following.op in ("placeholder", "get_attr"):
        following = following.next
    return following
