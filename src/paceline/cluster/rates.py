"""What programs reach of a device's peaks: the coefficients that a calibration finds.

The form of a product's time is 2 M N K / (peak * matmul) * (1 + k_half / K) * (1 + n_half / N) * (1 + m_half / M):
small dimensions fill a device badly.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Coefficients of one kind of device, and of the programs that run on it.

    Attributes:
        matmul: share of the peak that large products reach.
        k_half, n_half, m_half: the inner dimension, columns and rows at which a product takes twice its ideal time.
        units: tiles of a product's output that the device computes at once (streaming multiprocessors); 0: not known.
        unaligned: share of its speed that a product keeps where rows, columns or inner dimension are no multiple of 8.
        attention: share of the peak that fused attention reaches.
        narrow: share of `matmul` that large products in 8 or 4 bits reach of their own peak.
        memory: share of the memory's bandwidth that elementwise work reaches.
        launch_s: seconds that the host takes to start a call.
        gap_s: seconds that a device takes for a call beside its work, to fill and to drain.
        launch_power: how launching and computing hide each other: both together take the norm of this power of the two,
            their sum at 1, the longer one at infinity.
        message_s: seconds that the host takes for each collective of a block.
        collective: how many times what it takes alone a collective takes beside the computation of a block.
        exchange: the same of what replicas exchange.
        optimizer: how many times the optimizer reads and writes its bytes.
        transfer: how many times its own time a message between stages takes, waiting for the other side included.
        overlap: share of a backward pass beside which sums of gradients can run.
        step_s: seconds that each step takes whatever it computes.
        step_growth_s: further seconds of a step for each doubling of hosts.
        growth: share by which everything takes longer for each doubling of hosts (stragglers).
        spread: standard deviation of the logarithm of a step's time about an estimate.
        residuals: of steps that the coefficients were fitted to: coordinates as in `closed_form.kriging`, and the
            logarithm of measured over estimated seconds. Estimates near them are corrected.
    """

    matmul: float = 0.7
    k_half: float = 100.0
    n_half: float = 100.0
    m_half: float = 100.0
    units: int = 0
    unaligned: float = 1.0
    attention: float = 0.4
    narrow: float = 0.85
    memory: float = 0.8
    launch_s: float = 5e-6
    gap_s: float = 0.0
    launch_power: float = 4.0
    message_s: float = 0.0
    collective: float = 1.0
    exchange: float = 1.0
    optimizer: float = 1.0
    transfer: float = 1.0
    overlap: float = 0.5
    step_s: float = 0.0
    step_growth_s: float = 0.0
    growth: float = 0.0
    spread: float = 0.2
    residuals: tuple[tuple[float, ...], ...] = ()
