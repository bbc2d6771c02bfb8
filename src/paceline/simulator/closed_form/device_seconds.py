"""What devices take for what a block asks, by their rates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.cluster.cluster import Device, Group
from paceline.simulator.closed_form.demands import AXES, Demand, PassDemand, Products
from paceline.simulator.closed_form.waves import filled
from paceline.simulator.layouts import Integers
from paceline.simulator.workload import Numbers

NARROW = ("float8", "float4")
"""Types to which operands are cast for products alone."""

CAST_BYTES = 8 / 3
"""Bytes that casts move for each element of a product's first operand.

Inputs and gradients are each read in 16 bits and written twice in 8, as they are and transposed, for the three products
of a layer: 4 bytes for two of the three first operands.
"""

ALIGNED = 8
"""Elements of 16 bytes: what tensor cores load at once."""


@dataclass(frozen=True)
class Times:
    """Seconds with one micro-batch.

    Attributes:
        forward, backward: of calls alone, as if nothing was sent; recomputation counts with the backward pass.
        exposed: by axis, what collectives add.
    """

    forward: Numbers
    backward: Numbers
    exposed: dict[str, Numbers]

    @property
    def total(self) -> Numbers:
        """All of it."""
        return self.forward + self.backward + sum(self.exposed.values(), start=np.zeros(()))

    def __add__(self, other: Times) -> Times:
        exposed = {axis: self.exposed[axis] + other.exposed[axis] for axis in self.exposed}
        return Times(self.forward + other.forward, self.backward + other.backward, exposed)

    def of(self, which: Integers) -> Times:
        """Return those of some layouts, by their indices."""
        exposed = {axis: _of(each, which) for axis, each in self.exposed.items()}
        return Times(_of(self.forward, which), _of(self.backward, which), exposed)

    def scaled(self, times: Numbers) -> Times:
        """Return it so many times over."""
        exposed = {axis: times * each for axis, each in self.exposed.items()}
        return Times(times * self.forward, times * self.backward, exposed)


def _of(values: Numbers, which: Integers) -> Numbers:
    return values[which] if np.ndim(values) else values


NOTHING = Times(np.zeros(()), np.zeros(()), dict.fromkeys(AXES.values(), np.zeros(())))
"""What no block takes."""


def block_times(demand: Demand, group: Group, dtype: str) -> Times:
    """Return the seconds of one occurrence of a block on a device of a group.

    Host and device work side by side: together they take the norm of power `Rates.launch_power` of what each takes.
    """
    rates = group.device.rates
    forward = group.slowdown * pass_seconds(demand.forward, group.device, dtype)
    backward = group.slowdown * pass_seconds(demand.backward, group.device, dtype)
    host = rates.launch_s * (demand.forward.launches + demand.backward.launches) + rates.message_s * demand.messages
    device = forward + backward
    calls = together(device, host, rates.launch_power)
    share = np.where(device > 0, forward / np.where(device > 0, device, 1.0), 0.0)
    sent = {axis: rates.collective * each for axis, each in demand.network.items()}
    return Times(share * calls, (1 - share) * calls, sent)


def together(left: Numbers, right: Numbers, power: float) -> Numbers:
    """Return the norm of two durations: their sum for power 1, the longer of them for a very large one."""
    longer, shorter = np.maximum(left, right), np.minimum(left, right)
    share = np.divide(shorter, longer, out=np.zeros_like(longer), where=longer > 0)
    return np.asarray(longer * (1 + share**power) ** (1 / power))


def pass_seconds(demand: PassDemand, device: Device, dtype: str) -> Numbers:
    """Return the seconds of a pass on a device that is never kept waiting.

    Products in 8 or 4 bits read operands that were cast, which costs memory traffic; attention stays in 16 bits.
    """
    rates = device.rates
    peak, wide = peak_of(device, dtype), peak_of(device, wide_of(dtype))
    touched = demand.touched
    if dtype in NARROW:
        rows, _, inner = demand.products.sizes
        touched = touched + CAST_BYTES * np.sum(rows * inner, axis=0)
        peak = peak * rates.narrow
    attention = demand.attention / (wide * rates.attention)
    moved = touched / (device.bandwidth * rates.memory)
    gaps = rates.gap_s * demand.launches
    return np.asarray(product_seconds(demand.products, device, peak) + attention + moved + gaps)


def wide_of(dtype: str) -> str:
    """Return the type of what a step does not do in 8 or 4 bits: attention, and products outside of layers."""
    return "bfloat16" if dtype in NARROW else dtype


def peak_of(device: Device, dtype: str) -> float:
    """Return the peak for a type, or the highest one where a device has none for it."""
    return device.peak.get(dtype) or max(device.peak.values())


def product_seconds(products: Products, device: Device, peak: float) -> Numbers:
    """Return the seconds of all products of a pass."""
    rates = device.rates
    rows, columns, inner = products.sizes
    seconds = products.flops / (peak * rates.matmul)
    seconds = seconds * (1 + rates.m_half / rows) * (1 + rates.n_half / columns) * (1 + rates.k_half / inner)
    if rates.units:
        seconds = seconds / filled(products.sizes, rates.units)
    aligned = np.all(products.sizes % ALIGNED == 0, axis=0)
    return np.asarray(np.sum(seconds / np.where(aligned, 1.0, rates.unaligned), axis=0))
