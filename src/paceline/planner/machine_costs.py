"""What the solver that places tensors reckons with on a described cluster."""

from __future__ import annotations

from paceline.cluster.cluster import Cluster
from paceline.placement.costs import Costs
from paceline.placement.machine import Machine, constant


def costs_on(cluster: Cluster) -> Costs:
    """Return the costs of calls and of collectives over the fastest links of a cluster.

    They rank placements, as the round figures do that they replace, and predict nothing.
    """
    group, inside = cluster.slowest, cluster.levels[0]
    device, rates = group.device, group.device.rates
    half = device.peak.get("bfloat16", max(device.peak.values()))
    full = device.peak.get("float32", half)
    machine = Machine(
        per_call=max(rates.launch_s, rates.gap_s),
        products=constant(rates.matmul * full / group.slowdown),
        half_products=constant(rates.matmul * half / group.slowdown),
        touching=constant(rates.memory * device.bandwidth / group.slowdown),
    )
    return Costs(
        latency=inside.latency_s,
        per_byte_sent=group.link_slowdown / (inside.bandwidth * inside.efficiency),
        machine=machine,
    )
