"""What programs reach of a device's peaks: the coefficients that a calibration finds.

The form of a product's time is 2 M N K / (peak * matmul) * (1 + k_half / K) * (1 + n_half / N) * (1 + m_half / M):
small dimensions fill a device badly.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Coefficients of one kind of device.

    Attributes:
        matmul: share of the peak that large products reach.
        k_half, n_half, m_half: the inner dimension, columns and rows at which a product takes twice its ideal time.
        attention: share of the peak that fused attention reaches.
        memory: share of the memory's bandwidth that elementwise work reaches.
        launch_s: seconds that a call takes whatever it computes, on a stream that has nothing else to do.
    """

    matmul: float = 0.7
    k_half: float = 100.0
    n_half: float = 100.0
    m_half: float = 100.0
    attention: float = 0.4
    memory: float = 0.8
    launch_s: float = 5e-6
